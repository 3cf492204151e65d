"""Tests in a real browser what can be read without a pointer and on a phone: values, axes, colours and samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect

from shared.view.look import WorkKind
from tests.integration.tiny.harness import wait_for
from tests.integration.web.chromium import DESKTOP, PHONE, visit
from tests.integration.web.shown_run import add_samples, ended_run, page_of, rgb, row, sample

pytestmark = pytest.mark.slow

NARROW = {"width": 360, "height": 640}
BORDERS = "(all) => all.map((each) => [getComputedStyle(each).borderColor, getComputedStyle(each).borderStyle])"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return ended_run(tmp_path / "shown")


def rewrite(run: Path, *rows: dict[str, float]) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def chart(page: Page, title: str) -> Locator:
    found = page.locator(".chart", has=page.locator("h2", has_text=title))
    expect(found.locator(".u-legend")).to_be_visible()
    return found


def legend(page: Page, title: str) -> dict[str, str]:
    """Return the values of a chart's legend by the names of the series."""
    shown = chart(page, title)
    names, values = (shown.locator(f".u-legend {part}").all_inner_texts() for part in (".u-label", ".u-value"))
    return dict(zip(names, values, strict=True))


def box(element: Locator) -> FloatRect:
    found = element.bounding_box()
    assert found is not None
    return found


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_legend_has_the_newest_value_of_each_series_unless_a_pointer_is_over_a_chart(
    browser: Browser, run: Path, size: dict[str, int]
) -> None:
    steps = range(1, 41)
    rewrite(run, *(row(step) | ({"eval/held/reward": step / 100} if step % 25 == 0 else {}) for step in steps))
    newest = {"step": "40", "reward/mean": f"{row(40)['reward/mean']:.4g}", "eval/held/reward": "0.25"}
    with page_of(run) as url, visit(browser, url, size=size) as page:
        assert legend(page, "reward") == newest
        value = chart(page, "reward").locator(".u-legend .u-value").nth(1)
        assert 0 < box(value)["x"] < box(value)["x"] + box(value)["width"] < size["width"]
        over = box(chart(page, "reward").locator(".u-over"))
        middle = (over["x"] + over["width"] / 2, over["y"] + over["height"] / 2)
        if size == PHONE:
            page.touchscreen.tap(*middle)
        else:
            page.mouse.move(*middle)
        expect(value).not_to_have_text(newest["reward/mean"])
        pointed = int(legend(page, "reward")["step"])
        assert 15 < pointed < 26
        assert legend(page, "KL")["loss/kl"] == f"{row(pointed)['loss/kl']:.4g}"
        if size == DESKTOP:
            page.mouse.move(0, 0)
            expect(value).to_have_text(newest["reward/mean"])
            assert legend(page, "reward") == newest
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(row(41) | {'policy/entropy': 77.0})}\n")
        if size == DESKTOP:
            expect(chart(page, "entropy").locator(".u-legend")).to_contain_text("77")


def test_the_legend_of_zoomed_charts_follows_the_run(browser: Browser, run: Path) -> None:
    with page_of(run) as url, visit(browser, url) as page:
        assert legend(page, "reward")["step"] == "120"
        page.locator("#range").select_option("50")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(row(121) | {'reward/mean': 77.0})}\n")
        expect(chart(page, "reward").locator(".u-legend")).to_contain_text("77")
        assert legend(page, "reward")["step"] == "121"


def test_curves_of_zeros_get_an_axis_to_one_and_from_minus_one_where_they_can_be_negative(
    browser: Browser, run: Path
) -> None:
    zeros = {"loss/policy": 0.0, "reward/mean": 0.0, "policy/clip_fraction": 0.0, "rollout/truncated_fraction": 0.0}
    rewrite(run, *({"step": step, **zeros, "policy/entropy": 2.0, "time/step": step} for step in range(1, 9)))
    with page_of(run) as url, visit(browser, url) as page:
        ends = {
            title: chart(page, title).locator(".uplot").get_attribute("data-values")
            for title in ("reward", "clip fraction", "truncated", "loss", "entropy")
        }
        assert ends == {
            "reward": "-1 1", "clip fraction": "0 1", "truncated": "0 1", "loss": "-1 1", "entropy": "1.8 2.2",
        }  # fmt: skip
        times = chart(page, "seconds per step").locator(".uplot").get_attribute("data-values")
        low, high = map(float, str(times).split())
        assert low <= 1 < 8 <= high


@pytest.mark.parametrize("size", [DESKTOP, NARROW], ids=["desktop", "360"])
def test_the_legend_of_five_compared_runs_is_whole(browser: Browser, run: Path, size: dict[str, int]) -> None:
    others = [f"a-run-with-a-long-name-{number}" for number in range(4)]
    for name in others:
        ended_run(run.parent / name, steps=20)
    with page_of(run) as url, visit(browser, url, size=size) as page:
        expect(page.locator(".chart canvas").first).to_be_visible()
        page.locator("#compare summary").click()
        for name in others:
            page.locator("#runs label", has_text=name).locator("input").check()
        expect(chart(page, "reward").locator(".u-series")).to_have_count(6)
        shown = chart(page, "reward")
        for entry in [shown, *shown.locator(".u-legend, .u-series").all()]:
            assert entry.evaluate("(each) => each.scrollHeight - each.clientHeight") <= 1
        frame = box(shown)
        for entry in shown.locator(".u-series").all():
            inside = box(entry)
            assert frame["y"] <= inside["y"] < inside["y"] + inside["height"] <= frame["y"] + frame["height"]
            assert frame["x"] <= inside["x"] < inside["x"] + inside["width"] <= frame["x"] + frame["width"] + 1
        colors = shown.locator(".u-series .u-marker").evaluate_all(BORDERS)
        assert len({color for color, _ in colors[1:]}) == 5
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_a_curve_has_the_colour_of_the_work_that_it_measures_and_curves_of_one_colour_differ_in_their_dashes(
    browser: Browser, run: Path
) -> None:
    times = {"time/step": 1.0, "time/wait_batch": 0.2, "time/forward_backward": 0.5, "time/publish": 0.1}
    mismatch = {f"rollout/logprob_mismatch{part}": 0.1 for part in ("", "_engine", "_lag")}
    rewrite(run, *({"step": step, **times, **mismatch} for step in range(1, 9)))
    with page_of(run) as url, visit(browser, url) as page:
        marks = {
            title: chart(page, title).locator(".u-series .u-marker").evaluate_all(BORDERS)[1:]
            for title in ("seconds per step", "mismatch")
        }
    kinds = (WorkKind.STEP, WorkKind.IDLE, WorkKind.TRAIN, WorkKind.WEIGHTS)
    assert marks["seconds per step"] == [[rgb(kind), "solid"] for kind in kinds]
    assert marks["mismatch"] == [[rgb(WorkKind.GENERATE), border] for border in ("solid", "dashed", "dotted")]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_prompts_and_completions_come_first_on_a_phone(browser: Browser, run: Path, dark: bool) -> None:
    long = sample("train/0/1", 0, step=7, reward=1.0, text="an answer of many words " * 200)
    add_samples(run, 7, long, sample("train/0/1", 1, step=7, reward=0.0, text="13x"))
    with page_of(run) as url, visit(browser, url, size=NARROW, dark=dark) as page:
        page.get_by_role("button", name="Samples").click()
        first = page.locator("#sample-list tbody tr").first
        prompt, completion, reward = (
            first.locator(f'td[data-head="{head}"]') for head in ("prompt", "completion", "reward")
        )
        expect(completion).to_contain_text("an answer of many words")
        assert box(prompt)["y"] < box(completion)["y"] < box(reward)["y"]
        assert box(completion)["x"] + box(completion)["width"] <= NARROW["width"]
        first.focus()
        page.keyboard.press("Enter")
        texts = page.locator("#sample .text")
        expect(texts.nth(1)).to_contain_text("an answer of many words")
        expect(page.locator("#sample")).to_be_focused()
        wait_for("the scroll to the sample", lambda: box(page.locator("#sample"))["y"] < 40)
        facts = page.locator("#sample > .facts").first
        tops = [box(element)["y"] for element in (texts.nth(0), texts.nth(1), facts)]
        assert tops == sorted(tops)
        assert tops[1] < NARROW["height"] - 60
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        token = page.locator("#sample .tokens span").nth(19)  # the least probable one has the strongest colour
        colors = token.evaluate("(each) => [getComputedStyle(each).backgroundColor, getComputedStyle(each).color]")
        assert "0 0 0 / 0" not in colors[0]
