"""Tests the drawings of the terminal interface: curves, bars, lanes, samples, and text that cannot control the
terminal."""

from __future__ import annotations

import math

import pytest
from rich.text import Text

from launch.viewers.samples import STYLES, Color
from launch.viewers.terminal import panes
from launch.viewers.terminal.plot import LABEL, Series, bar, number, plot, styles
from launch.viewers.terminal.visible import visible, visible_text
from proto.messages import TopicRow
from shared.samples.record import SampleRecord
from shared.view import RunView
from shared.view.look import LOOKS, WorkKind
from shared.view.notices import LogLine

NOW = 1_000_000.0
DOTS = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]]


def dots(lines: list[Text]) -> set[tuple[int, int]]:
    """Return the position of each dot of a picture: its column and its row, counted from the top."""
    found = set()
    for y, line in enumerate(lines[1:-1]):
        for x, character in enumerate(line.plain[LABEL + 1 :]):
            code = ord(character) - 0x2800 if ord(character) >= 0x2800 else 0
            found |= {(2 * x + dx, 4 * y + dy) for dy in range(4) for dx in range(2) if code & DOTS[dy][dx]}
    return found


@pytest.mark.parametrize(("width", "height"), [(40, 8), (80, 20), (20, 4), (9, 3)])
def test_a_picture_fills_its_size_exactly(width: int, height: int) -> None:
    points = [(float(step), math.sin(step / 3)) for step in range(100)]
    lines = plot("reward", [Series("reward/mean", points)], width, height)
    assert len(lines) == height
    assert {line.cell_len for line in lines[1:]} <= {max(width, LABEL + 5), width}


def test_a_rising_curve_goes_from_bottom_left_to_top_right_without_gaps() -> None:
    lines = plot("x", [Series("x", [(0.0, 0.0), (10.0, 5.0)])], 40, 12)
    found = dots(lines)
    columns, rows = 2 * (40 - LABEL - 1), 4 * 10
    assert {(0, rows - 1), (columns - 1, 0)} <= found
    assert {x for x, _ in found} == set(range(columns))
    below = {x: max(y for at, y in found if at == x) for x, _ in found}
    assert all(below[x] <= below[x - 1] for x in range(1, columns))
    assert lines[1].plain.startswith("5".rjust(LABEL))
    assert lines[-2].plain.startswith("0".rjust(LABEL))


def test_a_column_shows_the_whole_range_of_its_points() -> None:
    points = [(float(step), float(step % 2)) for step in range(10_000)]
    found = dots(plot("x", [Series("x", points)], 30, 6))
    assert {y for x, y in found if x == 20} == set(range(16))


def test_a_constant_curve_and_a_single_point_can_be_drawn() -> None:
    assert dots(plot("x", [Series("x", [(1.0, 2.0), (9.0, 2.0)])], 40, 6))
    assert len(dots(plot("x", [Series("x", [(1.0, 2.0)])], 40, 6))) == 1
    assert not dots(plot("x", [Series("x", [])], 40, 6))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (1234.5, "1,234"), (12_345_678, "12.35M"), (-0.00076881, "-0.00077"), (1.2e-5, "1.2e-5"),
     (3e12, "3.0e12"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
    assert len(text) <= LABEL


def test_bars_are_filled_in_proportion_to_their_values() -> None:
    assert [bar(share, 4) for share in (-1, 0, 0.5, 1, 7)] == ["░░░░", "░░░░", "██░░", "████", "████"]


def test_the_lane_of_a_process_shows_work_on_top_of_waits() -> None:
    view = RunView()
    for what, at, seconds, of in (("generate", -5, 5.0, ""), ("lease", 0, 10.0, "scheduler/0")):
        values: dict[str, float | str] = {"what": what, "seconds": seconds, **({"of": of} if of else {})}
        view.apply(TopicRow(service="rollout", instance=0, topic="span", at=NOW + at, values=values))
    lines = [line.plain for line in panes.timeline(view, NOW, 78, 10.0)]
    lane = lines[0][panes.NAME_WIDTH + 1 :]
    assert lane.startswith("█" * 20 + "░" * 20)
    assert lane.split()[-2:] == ["50%", "50%"]
    assert "  rollout/0 waited 5.0 s of 10 s for a lease from scheduler/0" in lines


def test_the_ends_of_steps_are_marked_with_their_numbers() -> None:
    view = RunView()

    def span(name: str, at: float, **values: float | str) -> None:
        view.apply(TopicRow(service=name, instance=0, topic="span", at=NOW + at, values=values))

    for step, at in ((7, -6.0), (8, -1.0), (9, -0.5)):
        span("policy-trainer", at - 0.25, what="batch", seconds=0.0, of="scheduler/0", step=step)
        span("policy-trainer", at, what="step", seconds=0.25)
    span("rollout", -9, what="generate", seconds=1.0)
    lines = [line.plain[panes.NAME_WIDTH + 1 :] for line in panes.timeline(view, NOW, 78, 10.0)]
    assert lines[2] == " " * 16 + "│7" + " " * 18 + "│8│9"
    assert lines[1][:40] == "█" * 4 + " " * 12 + "│" + " " * 19 + "│ │ "


def test_a_process_is_listed_with_its_gpu_memory_and_incarnation() -> None:
    view = RunView()
    own: dict[str, float | str] = {"pid": 7, "incarnation": "0123456789abcdef", "gpu_bytes": 2.5 * (1 << 30)}
    view.apply(TopicRow(service="rollout", instance=0, topic="service", at=NOW, values={"state": "READY", "cause": ""}))
    view.apply(TopicRow(service="rollout", instance=0, topic="process", at=NOW, values=own))
    view.apply(TopicRow(service="scheduler", instance=0, topic="process", at=NOW, values={"pid": 8}))
    shown = [
        dict(zip(panes.SERVICE_COLUMNS, (cell.plain for cell in panes.service_cells(each)), strict=True))
        for each in view.services(NOW)
    ]
    assert [each["GPU memory"] for each in shown] == ["2.5 GiB", "-"]
    assert [each["incarnation"] for each in shown] == ["01234567", "-"]


def test_the_overview_can_be_drawn_before_anything_is_known_about_the_run() -> None:
    lines = panes.overview(RunView(), NOW, 76, 19)
    assert any("no step has completed yet" in line.plain for line in lines)


def test_control_characters_become_visible_and_line_breaks_are_kept() -> None:
    text = visible("a\x1b[31m\tb\nc\x9b\u202e\x00\x7f")
    assert text == "a␛[31m b\nc��␀␡"
    styled = visible_text(Text("\x1b]0;x", style="red"))
    assert (styled.plain, styled.style) == ("␛]0;x", "red")


def test_only_tokens_with_unusual_values_are_coloured() -> None:
    record = SampleRecord(
        task="train/0/1", pieces=["Hel", "lo", "!"], completion="Hello!", logprobs=[-0.1, -9.0, -1.5],
        train_logprobs=[-0.9, -9.0, -1.5],
    )  # fmt: skip

    def styles(color: Color) -> dict[str, str]:
        text = panes.sample_page(record, color)
        return {text.plain[span.start : span.end]: str(span.style) for span in text.spans if span.style in STYLES[1:]}

    assert styles(Color.LOGPROB) == {"lo": STYLES[4], "!": STYLES[1]}
    assert styles(Color.MISMATCH) == {"Hel": STYLES[3]}
    assert styles(Color.NONE) == {}


def test_a_sample_of_ten_megabytes_is_truncated() -> None:
    record = SampleRecord(task="train/0/1", prompt="p" * (10 << 20), completion="c" * (10 << 20))
    text = panes.sample_page(record, Color.LOGPROB).plain
    assert len(text) < 3 * panes.MAX_SHOWN_CHARS
    assert "10,465,760 more characters" in text


def test_work_has_the_same_colour_in_lanes_curves_services_and_log_lines() -> None:
    view = RunView()

    def span(name: str, **values: float | str) -> None:
        view.apply(TopicRow(service=name, instance=0, topic="span", at=NOW, values={"seconds": 5.0, **values}))

    span("rollout", what="generate")
    span("reference", what="lease", of="scheduler/0")
    view.apply(TopicRow(service="rollout", instance=0, topic="service", at=NOW, values={"state": "READY"}))
    idle, generate = LOOKS[WorkKind.IDLE].color, LOOKS[WorkKind.GENERATE].color
    reference, rollout, *_, legend = panes.timeline(view, NOW, 78, 10.0)[:4]
    assert {str(part.style) for part in reference.spans if "#" in str(part.style)} == {idle}
    assert {str(part.style) for part in rollout.spans if "#" in str(part.style)} == {generate}
    assert legend.plain == "░ waiting: lease  █ generate: generate  "
    assert [str(part.style) for part in legend.spans] == [idle, generate]
    [cell, *_] = panes.service_cells(view.services(NOW)[0])
    assert (cell.plain, str(cell.spans[0].style)) == ("█ rollout/0", generate)
    line = panes.log_line(LogLine("2026-01-01T00:00:00", "info", "rollout/0", "began"))
    assert any(str(part.style).startswith(generate) for part in line.spans)


def test_curves_of_one_colour_differ_in_their_shades() -> None:
    names = ("time/forward_backward", "rollout/logprob_mismatch", "rollout/logprob_mismatch_lag")
    generate = LOOKS[WorkKind.GENERATE].color
    assert styles(names) == [LOOKS[WorkKind.TRAIN].color, generate, f"bold {generate}"]


@pytest.mark.parametrize(("name", "ends"), [("rollout/truncated_fraction", ["1", "0"]), ("loss/kl", ["1", "-1"])])
def test_a_curve_of_zeros_gets_the_axis_of_its_kind(name: str, ends: list[str]) -> None:
    lines = plot("x", [Series(name, [(1.0, 0.0), (9.0, 0.0)])], 40, 8)
    assert [lines[row].plain[:LABEL].strip() for row in (1, -2)] == ends
