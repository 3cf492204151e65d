"""Tests the colours of work and the axes of curves of zeros, which the page and the terminal interface share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proto.messages.trainer import WorkerRequest
from proto.registry import all_messages
from shared.view.look import LOOKS, WorkKind, limits, of_metric, of_service, of_span

ROOT = Path(__file__).resolve().parents[4]
STYLES = ROOT / "services" / "web" / "static" / "page.css"
MIN_CONTRAST = 3.0
"""WCAG 2.2, 1.4.11: minimum contrast of graphical objects with what is next to them."""


def luminance(color: str) -> float:
    digits = color.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_colour_of_each_kind_of_work_can_be_seen_on_the_page_in_both_themes() -> None:
    grounds = re.findall(r"--(?:back|panel): light-dark\((#\w+), (#\w+)\)", STYLES.read_text())
    assert len(grounds) == 2
    for kind, look in LOOKS.items():
        for ground in (color for pair in grounds for color in pair):
            assert contrast(look.color, ground) >= MIN_CONTRAST, (kind, ground)


def test_no_two_kinds_of_work_have_the_same_colour() -> None:
    assert set(LOOKS) == set(WorkKind)
    assert len({look.color for look in LOOKS.values()}) == len(WorkKind)


def test_every_request_to_a_trainer_worker_is_a_kind_of_work() -> None:
    requests = [kind.__name__ for kind in all_messages().values() if issubclass(kind, WorkerRequest)]
    assert "ForwardBackward" in requests
    assert [name for name in requests if of_span(name, waits=False) is WorkKind.OTHER] == []


def test_every_documented_metric_measures_a_kind_of_work() -> None:
    names = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text().split("\n## ")[0], re.MULTILINE)
    assert len(names) > 40
    assert [name for name in names if of_metric(name) is WorkKind.OTHER] == ["step"]


def test_the_longest_part_that_fits_the_name_of_a_metric_decides() -> None:
    assert of_metric("policy/grad_norm") is WorkKind.OPTIMIZER
    assert of_metric("policy/clip_fraction") is WorkKind.TRAIN
    assert of_metric("time/forward_backward") is of_span("ForwardBackward", waits=False) is WorkKind.TRAIN
    assert of_metric("critic/grad_norm") is of_metric("time/critic") is of_service("critic/0") is WorkKind.CRITIC
    assert of_metric("time/wait_batch") is of_span("batch", waits=True) is WorkKind.IDLE
    assert of_metric("rollout/kl") is of_service("rollout/3") is of_span("generate", waits=False) is WorkKind.GENERATE


@pytest.mark.parametrize(
    ("low", "high", "signed", "ends"),
    [(0, 0, False, (0, 1)), (0, 0, True, (-1, 1)), (5, 5, False, (4.5, 5.5)), (-2, -2, True, (-2.2, -1.8)),
     (0, 3, False, (0, 3))],
)  # fmt: skip
def test_a_constant_curve_gets_space_around_it(
    low: float, high: float, signed: bool, ends: tuple[float, float]
) -> None:
    assert limits(low, high, signed=signed) == pytest.approx(ends)
