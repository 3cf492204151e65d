"""The history of a run consists of all committed rows, in commit order, whichever steps were rolled back."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import pytest

from services.scheduler.metrics_file import MetricsFile
from services.tracker.history import History, Row


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


def told(rows: list[Row]) -> list[tuple[int, int, float]]:
    return [(row.lineage, row.step, row.values["loss"]) for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive_once_in_commit_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run, follower, seen, step = Run(tmp_path), History(tmp_path), list[Row](), -1
    for _ in range(chance.randrange(20, 200)):
        if step > 0 and chance.random() < 0.1:
            step = chance.randrange(-1, step + 1)
            run.rewind(step)
        else:
            step += 1
            run.commit(step)
        if chance.random() < 0.2:
            follower.refresh()
            seen += follower.rows(len(seen), chance.choice([1, 5, 1000]))
    follower.refresh()
    seen += follower.rows(len(seen), 10_000)
    assert told(seen) == run.committed
    assert [row.position for row in seen] == list(range(len(run.committed)))
    late = History(tmp_path)
    late.refresh()
    assert late.rows(0, 10_000) == seen


def test_rows_that_are_in_both_files_are_returned_once(tmp_path: Path) -> None:
    run, follower = Run(tmp_path), History(tmp_path)
    for step in range(5):
        run.commit(step)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run.rewind(2)
    after = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(before)  # the scheduler died before it truncated this file
    follower.refresh()
    assert told(follower.rows(0, 10)) == run.committed
    (tmp_path / "metrics.jsonl").write_bytes(after)
    run.commit(3)
    follower.refresh()
    assert told(follower.rows(0, 10)) == run.committed


def test_rows_that_are_replaced_by_rows_of_the_same_length_are_read_again(tmp_path: Path) -> None:
    run, follower = Run(tmp_path), History(tmp_path)
    for step in range(6):
        run.commit(step)
    follower.refresh()
    run.rewind(2)
    for step in range(3, 6):
        run.commit(step)  # rows of the same length at the same byte offsets
    assert told(follower.rows(0, 10)) == run.committed


def test_places_of_rows_that_were_sent_are_forgotten_and_found_again(tmp_path: Path) -> None:
    run, follower = Run(tmp_path), History(tmp_path)
    for step in range(50):
        run.commit(step)
        follower.refresh()
        assert told(follower.rows(step, 10)) == run.committed[step:]
        assert len(follower._lines) == 1
    assert (len(follower), follower.step(49)) == (50, 49)
    assert told(follower.rows(20, 10)) == run.committed[20:30]
    assert (len(follower), follower.step(3)) == (50, 3)
    run.rewind(40)
    run.commit(41)
    follower.refresh()
    assert told(follower.rows(48, 10)) == run.committed[48:]


def test_incomplete_lines_and_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": null, "b": 1.0}\n{"step": 1, "a": 2')
    follower = History(tmp_path)
    follower.refresh()
    assert follower.rows(0, 10) == [Row(0, 0, 0, {"step": 0, "b": 1.0})]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(".0}\n")
    follower.refresh()
    assert follower.rows(1, 10) == [Row(1, 0, 1, {"step": 1, "a": 2.0})]


def test_a_file_that_cannot_be_read_for_a_moment_does_not_change_any_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, follower = Run(tmp_path), History(tmp_path)
    for step in range(3):
        run.commit(step)
    follower.refresh()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", full)
        with pytest.raises(OSError, match="Too many"):
            follower.refresh()
    run.commit(3)
    follower.refresh()
    assert told(follower.rows(0, 10)) == run.committed
