"""Tests the curves that `ctl plot` draws: chosen metrics, steps that were rolled back, hostile names, long runs, and
refusals.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from launch.ctl import app
from launch.viewers.curves import chosen, read_history
from launch.viewers.drawing import BUCKETS, nice_ticks, picture, short, thinned
from shared.rpc.errors import RpcError

SVG = "{http://www.w3.org/2000/svg}"


def write(folder: Path, rows: Iterable[Mapping[str, object]], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def a_run(folder: Path, steps: int = 4) -> Path:
    rows = [{"step": step, "reward/mean": step / 10, "eval/held/accuracy": 0.5} for step in range(1, steps + 1)]
    return write(folder, rows)


def plot(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    return done.exit_code, done.output


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 (it is our own)


def test_a_picture_has_a_chart_for_each_metric_and_a_colour_for_each_run(tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    status, text = plot(a_run(tmp_path / "one"), a_run(tmp_path / "two"), "--out", out)
    assert (status, text) == (0, f"{out}: 2 metrics of one, two\n")
    root = parsed(out.read_text())
    titles = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "title"]
    assert titles == ["reward/mean", "eval/held/accuracy"]
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 4
    assert len({line.get("stroke") for line in lines}) == 2


def test_higher_values_are_drawn_higher(tmp_path: Path) -> None:
    drawn = picture([read_history(a_run(tmp_path / "run"))], ["reward/mean"])
    line = next(parsed(drawn).iter(f"{SVG}polyline"))
    heights = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 4


def test_steps_that_were_rolled_back_are_drawn_apart_from_the_curve(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    gone = [{"lineage": 1, "step": 3, "reward/mean": 9.0}, {"lineage": 1, "step": 4, "reward/mean": 9.0}]
    write(run, gone, "metrics.discarded.jsonl")
    history = read_history(run)
    assert history.points("reward/mean")[-1] == (4, 0.4)
    assert history.taken_back("reward/mean") == [[(3, 9.0), (4, 9.0)]]
    drawn = parsed(picture([history], ["reward/mean"]))
    assert [line.get("class") for line in drawn.iter(f"{SVG}polyline")] == ["back", "kept"]


def test_a_row_without_the_metric_and_an_incomplete_line_give_no_point(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"step": 1, "loss/kl": None}, {"step": 2, "loss/kl": 0.5}, {"step": 3}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/kl": 0.')
    assert read_history(run).points("loss/kl") == [(2, 0.5)]


def test_metrics_are_chosen_by_name_and_by_pattern(tmp_path: Path) -> None:
    history = read_history(write(tmp_path / "run", [{"step": 1, "eval/a/accuracy": 1, "eval/b/accuracy": 0, "x": 2}]))
    assert chosen([history], ["eval/*/accuracy"]) == ["eval/a/accuracy", "eval/b/accuracy"]
    assert chosen([history], ["x"]) == ["x"]
    assert chosen([history], []) == ["eval/a/accuracy", "eval/b/accuracy"]


def test_an_unknown_metric_is_refused_and_the_nearest_name_suggested(tmp_path: Path) -> None:
    with pytest.raises(RpcError, match=r"metric 'reward/men': .* did you mean 'reward/mean'\?"):
        chosen([read_history(a_run(tmp_path / "run"))], ["reward/men"])


@pytest.mark.parametrize(
    ("out", "run", "line"),
    [
        ("x.png", "run", "must end in .svg"),
        ("missing/x.svg", "run", "cannot be written"),
        ("x.svg", "nowhere", "has no metrics.jsonl"),
    ],
)
def test_a_wrong_command_line_gives_a_one_line_error(tmp_path: Path, out: str, run: str, line: str) -> None:
    a_run(tmp_path / "run")
    status, text = plot(tmp_path / run, "--out", tmp_path / out)
    assert status == 2
    assert line in text
    assert text.count("\n") == 1


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    name = 'reward/part/</text><script>alert(1)</script>"\u202e\x1b[31m\x00'
    drawn = picture([read_history(write(tmp_path / "<b>", [{"step": 1, name: 1.0}]))] * 2, [name])
    root = parsed(drawn)
    assert not list(root.iter(f"{SVG}script"))
    assert not {"\u202e", "\x1b", "\x00"} & set(drawn)


def test_a_long_run_keeps_its_peaks_and_makes_a_small_picture(tmp_path: Path) -> None:
    steps = 100_000
    points = [(step, 100.0 if step == 77_777 else math.sin(step)) for step in range(steps)]
    seen = thinned(points)
    assert (77_777, 100.0) in seen
    assert len(seen) <= 2 * BUCKETS + 2
    assert (seen[0], seen[-1]) == (points[0], points[-1])
    history = read_history(write(tmp_path / "run", [{"step": step, "m": value} for step, value in points]))
    began = time.process_time()
    assert len(picture([history], ["m"])) < 16_000
    assert time.process_time() - began < 5


@pytest.mark.parametrize("values", [(0, 0), (1e-13, 2e-13), (-5, 5), (1e299, -1e299), (3, 3), (0.5, 0.5000001)])
def test_a_few_ticks_cover_the_values(values: tuple[float, float]) -> None:
    low, high = sorted(values)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert all(len(short(tick)) <= 9 for tick in ticks)
