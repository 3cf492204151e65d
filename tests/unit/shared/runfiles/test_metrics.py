"""The follower of metrics.jsonl sees new rows and rows that were rolled back, however the file has changed."""

from __future__ import annotations

import json
from pathlib import Path

from services.scheduler.metrics_file import MetricsFile
from shared.runfiles.metrics import MetricsFollower, NewRows


def line(step: int, value: float | None = 0.5) -> str:
    return json.dumps({"step": step, "reward/mean": value}) + "\n"


def steps(read: NewRows) -> list[float | None]:
    return [row["step"] for row in read.rows]


def test_new_rows_are_read_once_and_incomplete_lines_once_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.poll() == NewRows([], restarted=False, more=False)
    path.write_text(line(1) + line(2)[:8])
    assert steps(follower.poll()) == [1]
    path.write_text(line(1) + line(2, None))
    assert follower.poll() == NewRows([{"step": 2, "reward/mean": None}], restarted=False, more=True)
    assert follower.poll() == NewRows([], restarted=False, more=False)


def test_a_file_that_was_truncated_and_has_grown_beyond_its_old_end_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    path.write_text(line(1) + line(2) + line(3))
    follower.poll()
    path.write_text(line(1) + line(2, 0.75) + line(3, 0.25) + line(4) + line(5))
    read = follower.poll()
    assert read.restarted
    assert steps(read) == [1, 2, 3, 4, 5]


def test_a_file_that_was_truncated_or_removed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    path.write_text(line(1) + line(2))
    follower.poll()
    path.write_text(line(1))
    assert follower.poll() == NewRows([{"step": 1, "reward/mean": 0.5}], restarted=True, more=True)
    path.write_text("")
    assert follower.poll() == NewRows([], restarted=True, more=False)
    assert follower.poll() == NewRows([], restarted=False, more=False)
    path.write_text(line(1))
    assert steps(follower.poll()) == [1]
    path.unlink()
    assert follower.poll() == NewRows([], restarted=True, more=False)


def test_rows_that_the_scheduler_rolls_back_are_noticed_even_if_the_file_has_grown_since(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, lambda _: [], 0, 1)
    for step in range(1, 11):
        file.write(line(step).strip())
    follower = MetricsFollower(path)
    assert steps(follower.poll()) == list(range(1, 11))
    file.discard(1, 4, {})
    for step in range(5, 15):
        file.write(line(step, 0.25).strip())
    read = follower.poll()
    assert read.restarted
    assert steps(read) == list(range(1, 15))
    file.close()


def test_a_long_file_is_read_in_pages(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(1, 20_000)))
    follower, found = MetricsFollower(path), []
    while (page := follower.poll()).more:
        found.append(steps(page))
    assert [step for page in found for step in page] == list(range(1, 20_000))
    assert len(found) > 2


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"step": 2, "reward\n[3]\n' + line(4))
    assert steps(MetricsFollower(path).poll()) == [1, 4]
