"""Tests the saved pages of runs: the report at the end of a run, and the curves of several runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.ctl import app
from launch.viewers import report
from launch.viewers.report import REPORT, chosen, write_in_time, write_report
from shared.rpc.errors import RpcError
from shared.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(path=tmp_path / "run", sockets=tmp_path / "sockets", shm=tmp_path / "shm")
    (made.path / "logs").mkdir(parents=True)
    made.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    return made


def test_a_run_that_failed_before_its_first_step_has_a_report(run: RunDir) -> None:
    run.metrics.unlink()
    run.outcome.write_text('{"outcome": "failed", "cause": "rollout/0: exit status 1"}')
    assert "failed: rollout/0: exit status 1" in write_report(run).read_text()


def test_a_failure_to_write_the_report_is_reported_and_leaves_no_file_behind(run: RunDir) -> None:
    (run.path / REPORT).mkdir()
    assert write_in_time(run, 60).startswith("not written (IsADirectoryError: ")
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]


def test_the_end_of_a_run_does_not_wait_for_a_slow_report(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(report, "page", lambda _: "late" if gate.wait(30) else "never")
    began = time.monotonic()
    told = write_in_time(run, 0.1)
    assert time.monotonic() - began < 10
    assert told == f"not ready after 0.1 s; python -m launch.ctl --run {run.path} report writes it"
    assert not (run.path / REPORT).exists()
    gate.set()


def test_a_new_report_replaces_the_previous_one(run: RunDir) -> None:
    assert write_in_time(run, 60) == str(run.path / REPORT)
    first = (run.path / REPORT).read_text()
    run.metrics.write_text(json.dumps({"step": 1, "reward/mean": 9.0}) + "\n")
    write_report(run)
    assert (run.path / REPORT).read_text() != first
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]


def write(folder: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def a_run(folder: Path, steps: int = 4) -> Path:
    rows = [{"step": step, "reward/mean": step / 10, "eval/held/accuracy": 0.5} for step in range(1, steps + 1)]
    return write(folder, rows)


def plot(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    return done.exit_code, done.output


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    found: dict[str, Any] = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    return found


def test_a_page_has_the_curves_of_all_runs_and_a_chart_for_each_metric(tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    runs = a_run(tmp_path / "one"), a_run(tmp_path / "two")
    status, text = plot(*runs, "--out", out, "--metric", "eval/*/accuracy", "--metric", "reward/mean")
    assert (status, text) == (0, f"{out}: 2 metrics of one, two\n")
    data = data_of(out)
    assert [panel["names"] for panel in data["head"]["panels"]] == [["eval/held/accuracy"], ["reward/mean"]]
    assert (data["head"]["run"], data["head"]["compared"]) == ("one", ["two"])
    assert data["curves"]["two"]["points"]["reward/mean"] == [[1, 0.1], [2, 0.2], [3, 0.3], [4, 0.4]]


def test_runs_whose_folders_have_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        a_run(tmp_path / name / "run")
    out = tmp_path / "x.html"
    assert plot(tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", out)[0] == 0
    assert list(data_of(out)["curves"]) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_steps_that_were_rolled_back_are_not_drawn(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run", steps=2), tmp_path / "x.html"
    gone = {"lineage": 0, "step": 3, "reward/mean": 9.0}
    (run / "metrics.discarded.jsonl").write_text(json.dumps(gone) + "\n")
    assert plot(run, "--out", out)[0] == 0
    assert data_of(out)["curves"]["run"]["points"]["reward/mean"] == [[1, 0.1], [2, 0.2]]


def test_metrics_are_chosen_by_name_and_by_pattern() -> None:
    known = ["eval/a/reward", "eval/b/reward", "x"]
    assert chosen(known, ["eval/*/reward"]) == ["eval/a/reward", "eval/b/reward"]
    assert chosen(known, ["x"]) == ["x"]
    assert chosen(known, []) == ["eval/a/reward", "eval/b/reward"]


def test_an_unknown_metric_is_refused_and_the_nearest_name_suggested() -> None:
    with pytest.raises(RpcError, match=r"metric 'reward/men': .* did you mean 'reward/mean'\?"):
        chosen(["reward/mean"], ["reward/men"])


@pytest.mark.parametrize(
    ("out", "run", "line"),
    [
        ("x.svg", "run", "must end in .html"),
        ("missing/x.html", "run", "cannot be written"),
        ("x.html", "nowhere", "has no metrics.jsonl"),
    ],
)
def test_a_wrong_command_line_gives_a_one_line_error(tmp_path: Path, out: str, run: str, line: str) -> None:
    a_run(tmp_path / "run")
    status, text = plot(tmp_path / run, "--out", tmp_path / out)
    assert status == 2
    assert line in text
    assert text.count("\n") == 1
