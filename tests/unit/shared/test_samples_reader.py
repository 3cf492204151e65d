"""Tests the reading of `samples/` in a run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.samples.reader import read, splits, steps
from shared.samples.record import FOLDER, SampleRecord, SampleState, file_of


def write(run: Path, *records: SampleRecord, torn: bytes = b"") -> None:
    for record in records:
        assert record.step is not None
        path = run / FOLDER / file_of(record.split, record.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n" + torn)


def sample(step: int, index: int, number: int = 0) -> SampleRecord:
    return SampleRecord(task=f"train/0/{index}", sample=number, step=step, completion="4 + 3", reward=0.5)


def test_records_are_read_by_step_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, sample(10, 3), sample(9, 1), sample(9, 1, 1))
    assert steps(tmp_path) == [9, 10]
    assert read(tmp_path) == [sample(9, 1), sample(9, 1, 1), sample(10, 3)]
    assert read(tmp_path, step=10) == [sample(10, 3)]
    assert read(tmp_path, step=11) == []


def test_a_limit_keeps_the_newest_steps(tmp_path: Path) -> None:
    write(tmp_path, sample(1, 0), sample(2, 1), sample(2, 2))
    assert read(tmp_path, limit=1) == [sample(2, 1)]
    assert read(tmp_path, limit=3) == [sample(1, 0), sample(2, 1), sample(2, 2)]


def test_one_task_is_found_in_all_steps(tmp_path: Path) -> None:
    write(tmp_path, sample(1, 1), sample(1, 10), sample(4, 1))
    assert read(tmp_path, task="train/0/1") == [sample(1, 1), sample(4, 1)]


def test_each_evaluation_set_has_its_own_split(tmp_path: Path) -> None:
    scored = SampleRecord(task="sums/7/0", split="eval/sums", step=7, state=SampleState.SCORED)
    write(tmp_path, scored)
    assert splits(tmp_path) == ["eval/sums"]
    write(tmp_path, sample(1, 0))
    assert splits(tmp_path) == ["train", "eval/sums"]
    assert steps(tmp_path, "eval/sums") == [7]
    assert read(tmp_path, split="eval/sums") == [scored]


def test_torn_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, sample(1, 0), torn=b'{"task": 3}\nnot json\n')
    write(tmp_path, sample(1, 1), torn=msgspec.json.encode(sample(1, 2))[:-5])
    assert read(tmp_path) == [sample(1, 0), sample(1, 1)]


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert steps(tmp_path) == []
    assert splits(tmp_path) == []
    assert read(tmp_path, task="train/0/0") == []


@pytest.mark.parametrize("split", ["../..", "eval/..", "eval/", "eval/a/../..", "/etc", "", "discarded"])
def test_a_name_that_is_not_a_split_has_no_samples(tmp_path: Path, split: str) -> None:
    run = tmp_path / "a" / "b"
    write(run, sample(1, 0))
    for folder in (tmp_path, tmp_path / "a", run, run / FOLDER / "discarded"):
        folder.mkdir(exist_ok=True)
        (folder / "1.jsonl").write_bytes(msgspec.json.encode(sample(1, 0)) + b"\n")
    assert read(run, split=split) == read(run, step=1, split=split) == []
    assert steps(run, split) == []
