"""Tests the readers of metrics.jsonl: the rows that count, and all rows that were ever committed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from services.scheduler.metrics_file import MetricsFile
from shared.runfiles.metrics import CommittedRow, CommittedRows, MetricsFollower, NewRows


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


class Run:
    """The metrics files of a run, written by the scheduler's own code, and every row that was ever committed."""

    def __init__(self, folder: Path) -> None:
        self.file = MetricsFile(folder / "metrics.jsonl", lambda _: [], -1, 0)
        self.committed: list[tuple[int, int, float]] = []
        """Lineage, step and value of every row, in order."""
        self.lineage = 0
        self.next_lineage = 0
        self._count = 0

    def commit(self, step: int) -> None:
        self._count += 1
        self.file.write(json.dumps({"step": float(step), "loss": float(self._count)}))
        self.committed.append((self.lineage, step, float(self._count)))

    def rewind(self, step: int) -> None:
        """Rewind to `step`; later rows move to the file of discarded rows, under the lineage that ended."""
        had_rows = self.file.step > step
        self.next_lineage += 1  # a reload begins a lineage even if it rolls nothing back
        self.file.discard(self.next_lineage - 1, step, {})
        if had_rows:
            self.lineage = self.next_lineage


def told(rows: list[CommittedRow]) -> list[tuple[int, int, float]]:
    return [(row.lineage, row.step, row.values["loss"]) for row in rows]


def rest(rows: CommittedRows) -> list[CommittedRow]:
    """Return all rows that `rows` has not returned yet."""
    found, more = [], True
    while more:
        page, more = rows.poll()
        found += page
    return found


@pytest.mark.parametrize("seed", range(30))
def test_rows_arrive_once_in_commit_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run, follower, seen, step = Run(tmp_path), CommittedRows(tmp_path), list[CommittedRow](), -1
    for _ in range(chance.randrange(20, 200)):
        if step > 0 and chance.random() < 0.1:
            step = chance.randrange(-1, step + 1)
            run.rewind(step)
        else:
            step += 1
            run.commit(step)
        if chance.random() < 0.2:
            seen += rest(follower)
    seen += rest(follower)
    assert told(seen) == run.committed
    assert rest(CommittedRows(tmp_path)) == seen
    assert [row.position for row in seen] == list(range(len(run.committed)))


def test_rows_that_are_in_both_files_are_returned_once(tmp_path: Path) -> None:
    run, follower = Run(tmp_path), CommittedRows(tmp_path)
    for step in range(5):
        run.commit(step)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run.rewind(2)
    after = (tmp_path / "metrics.jsonl").read_bytes()
    discarded = (tmp_path / "metrics.discarded.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(before)  # the scheduler died before it truncated this file,
    (tmp_path / "metrics.discarded.jsonl").write_bytes(discarded.splitlines(keepends=True)[0])  # or even earlier
    seen = rest(follower)
    assert told(seen) == run.committed[:4]
    (tmp_path / "metrics.discarded.jsonl").write_bytes(discarded)
    seen += rest(follower)
    assert told(seen) == run.committed
    (tmp_path / "metrics.jsonl").write_bytes(after)
    run.commit(3)
    assert told(seen + rest(follower)) == run.committed
    assert told(rest(CommittedRows(tmp_path))) == run.committed


def test_rows_that_are_replaced_by_rows_of_the_same_length_are_returned(tmp_path: Path) -> None:
    run, follower = Run(tmp_path), CommittedRows(tmp_path)
    for step in range(6):
        run.commit(step)
    seen = rest(follower)
    run.rewind(2)
    for step in range(3, 6):
        run.commit(step)  # rows of the same length at the same byte offsets
    assert told(seen + rest(follower)) == run.committed


def test_incomplete_lines_and_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": null, "b": 1.0}\n{"step": 1, "a": 2')
    follower = CommittedRows(tmp_path)
    assert rest(follower) == [CommittedRow(0, 0, 0, {"step": 0, "b": 1.0})]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(".0}\n")
    assert rest(follower) == [CommittedRow(1, 0, 1, {"step": 1, "a": 2.0})]
