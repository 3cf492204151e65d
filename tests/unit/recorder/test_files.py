"""In the files of `samples/`, each task is written once and completely, the size limit is respected, and an interrupted
write is repaired."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.recorder.files import SampleFiles
from shared.samples.reader import read, steps
from shared.samples.record import DISCARDED, SampleRecord, SampleState

LARGE = 1 << 30


def group(step: int, index: int, samples: int = 2, *, lineage: int = 0, split: str = "train") -> list[SampleRecord]:
    return [
        SampleRecord(
            task=f"train/0/{index}", sample=number, samples=samples, step=step, lineage=lineage, split=split, at=1.0
        )
        for number in range(samples)
    ]


def files(run: Path, limit_bytes: int = LARGE) -> SampleFiles:
    return SampleFiles(run / "samples", limit_bytes)


def test_a_task_is_written_only_once_even_after_a_restart(tmp_path: Path) -> None:
    first = files(tmp_path)
    assert first.append(group(1, 0))
    assert not first.append(group(1, 0))
    second = files(tmp_path)
    assert not second.append(group(1, 0))
    assert second.append(group(1, 1))
    assert read(tmp_path) == [*group(1, 0), *group(1, 1)]


@pytest.mark.parametrize("cut", [1, 40, 160, 200])
def test_a_task_that_a_kill_left_incomplete_is_written_again(tmp_path: Path, cut: int) -> None:
    files(tmp_path).append(group(1, 0))
    files(tmp_path).append(group(1, 1))
    path = tmp_path / "samples" / "train" / "1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read(tmp_path)[:2] == group(1, 0)
    again = files(tmp_path)
    assert not again.append(group(1, 0))
    assert again.append(group(1, 1))
    assert path.read_bytes() == whole
    assert again.nbytes == len(whole)


def test_the_oldest_steps_are_removed_to_stay_within_the_limit(tmp_path: Path) -> None:
    one = files(tmp_path / "measured")
    one.append(group(1, 0))
    kept = files(tmp_path, limit_bytes=3 * one.nbytes)
    for step in (1, 2, 10, 11):
        kept.append(group(step, step))
        assert kept.nbytes <= 3 * one.nbytes + 16
    assert steps(tmp_path) == [10, 11]
    assert files(tmp_path).nbytes == kept.nbytes


def test_the_work_at_the_limit_does_not_grow_with_the_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = files(tmp_path / "measured")
    one.append(group(1000, 1000))
    count = 500
    many = files(tmp_path)
    for step in range(1000, 1000 + count):
        many.append(group(step, step))
    looked: list[Path] = []

    def step_of(path: Path) -> int:
        looked.append(path)
        return int(path.stem)

    monkeypatch.setattr("services.recorder.files._step", step_of)
    full = files(tmp_path, limit_bytes=count * one.nbytes)
    assert len(looked) == count, "once for each file when the recorder starts"
    looked.clear()
    for step in range(1000 + count, 1100 + count):
        full.append(group(step, step))
    assert full.removed == 100
    assert steps(tmp_path) == list(range(1100, 1100 + count))
    assert len(looked) == 100, "once for each new file"


def test_a_file_that_is_written_again_after_a_rollback_keeps_its_place(tmp_path: Path) -> None:
    store = files(tmp_path)
    for step in (1, 2, 3):
        store.append(group(step, step))
    store.discard(0, 1)
    for step in (2, 3, 4):
        store.append(group(step, step, lineage=1))
    store.limit_bytes = store.nbytes * 3 // 6  # the size of three of the six files
    store.append(group(5, 5, lineage=1))
    assert steps(tmp_path) == [3, 4, 5]
    assert store.nbytes == sum(each.stat().st_size for each in (tmp_path / "samples").rglob("*.jsonl"))


def test_samples_larger_than_the_limit_are_kept_until_newer_samples_arrive(tmp_path: Path) -> None:
    tight = files(tmp_path, limit_bytes=1)
    tight.append(group(1, 0))
    assert steps(tmp_path) == [1]
    tight.append(group(2, 1))
    assert steps(tmp_path) == [2]


def test_a_single_file_does_not_exceed_the_limit(tmp_path: Path) -> None:
    one = files(tmp_path / "measured")
    one.append(group(1, 0))
    kept = files(tmp_path, limit_bytes=3 * one.nbytes)
    assert [kept.append(group(1, index, split="eval/held")) for index in range(6)] == [True] * 2 + [False] * 4
    assert kept.nbytes <= 3 * one.nbytes
    assert kept.left_out == 4


def test_samples_of_rolled_back_steps_are_moved_away_and_those_of_repeated_steps_are_kept(tmp_path: Path) -> None:
    store = files(tmp_path)
    for step in (1, 2, 3):
        store.append(group(step, step))
    store.append(group(3, 0, split="eval/held"))
    assert store.discard(0, 1) == 3
    assert steps(tmp_path) == [1]
    assert steps(tmp_path, "eval/held") == []
    store.append(group(2, 2, lineage=1))
    again = files(tmp_path)
    assert again.discard(0, 1) == 0
    assert read(tmp_path, step=2) == group(2, 2, lineage=1)
    left = sorted(str(path.relative_to(tmp_path / "samples" / DISCARDED)) for path in tmp_path.rglob("0/*/*.jsonl"))
    assert left == ["0/train/2.jsonl", "0/train/3.jsonl"]


def test_discarded_samples_are_deleted_first(tmp_path: Path) -> None:
    store = files(tmp_path)
    for step in (1, 2):
        store.append(group(step, step))
    limit = store.nbytes
    store.discard(0, 1)
    tight = files(tmp_path, limit_bytes=limit)
    tight.append(group(2, 2, lineage=1))
    assert steps(tmp_path) == [1, 2]
    assert not list((tmp_path / "samples" / DISCARDED).rglob("*.jsonl"))


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = files(tmp_path)
    store.append(group(1, 0))
    real = __import__("os").write
    monkeypatch.setattr("services.recorder.files.os.write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with pytest.raises(OSError, match="is the disk full"):
        store.append(group(1, 1))
    monkeypatch.undo()
    assert read(tmp_path) == group(1, 0)
    assert store.append(group(1, 1))
    assert read(tmp_path) == [*group(1, 0), *group(1, 1)]


def test_a_damaged_last_line_does_not_hide_later_tasks(tmp_path: Path) -> None:
    files(tmp_path).append(group(1, 0))
    path = tmp_path / "samples" / "train" / "1.jsonl"
    with path.open("ab") as file:
        file.write(b"\xff\x00 not json\n")
    again = files(tmp_path)
    assert again.append(group(1, 1, samples=1))
    assert read(tmp_path) == [*group(1, 0), *group(1, 1, samples=1)]
    assert read(tmp_path)[0].state == SampleState.TRAINED


def test_a_file_whose_first_record_is_incomplete_does_not_replace_discarded_samples(tmp_path: Path) -> None:
    first = files(tmp_path)
    first.append(group(3, 0))
    written = first.nbytes
    assert first.discard(0, 2) == 1
    assert first.nbytes == written
    first.append(group(3, 1, lineage=1))
    path = tmp_path / "samples" / "train" / "3.jsonl"
    path.write_bytes(path.read_bytes()[:40])  # as a kill may leave it
    again = files(tmp_path)
    assert again.discard(0, 2) == 0
    assert again.append(group(3, 1, lineage=1))
    assert read(tmp_path) == group(3, 1, lineage=1)
    assert again.nbytes == sum(each.stat().st_size for each in (tmp_path / "samples").rglob("*.jsonl"))
