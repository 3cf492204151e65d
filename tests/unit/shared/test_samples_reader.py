"""Tests the reading of `samples/` in a run directory, and the selection of the samples to show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.recorder.files import SampleFiles
from shared.samples.reader import Order, read, select, splits, steps
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


COUNT = 700


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run whose worst, best and longest samples of step 2 were written last."""
    files = SampleFiles(tmp_path / "samples", 1 << 30)
    for step in (1, 2):
        for index in range(COUNT):
            late = index - COUNT + 3
            reward, length = {0: (-1.0, 5), 1: (2.0, 5), 2: (0.5, 99)}.get(late, (0.5, 5))
            files.append([SampleRecord(task=f"train/{step}/{index}", step=step, reward=reward, length=length)])
    files.append([SampleRecord(task="train/2/900", step=2, sample=-1, reward=-9.0)])
    return tmp_path


def test_the_limit_applies_after_the_order(run: Path) -> None:
    firsts = {
        order: [each.task for each in select(run, split="train", step=2, order=order, limit=2).records]
        for order in (None, *Order)
    }
    assert firsts == {
        None: ["train/2/0", "train/2/1"],
        Order.WORST: [f"train/2/{COUNT - 3}", "train/2/0"],
        Order.BEST: [f"train/2/{COUNT - 2}", "train/2/0"],
        Order.LONGEST: [f"train/2/{COUNT - 1}", "train/2/0"],
    }


def test_the_samples_beyond_the_limit_are_counted(run: Path) -> None:
    assert select(run, split="train", step=2, limit=10).total == COUNT + 1
    found = select(run, split="train", step=2, order=Order.WORST, limit=10)
    assert (found.total, found.shown) == (COUNT, f"the first 10 of {COUNT} samples")
    whole = select(run, split="train", step=2, order=Order.WORST)
    assert (len(whole.records), whole.shown) == (COUNT, f"{COUNT} samples")


def test_a_failed_sample_is_the_worst(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "samples", 1 << 30)
    for task, reward in (("train/0/1", -5.0), ("train/0/2", None), ("train/0/3", 1.0)):
        files.append([SampleRecord(task=task, step=1, reward=reward)])
    worst, best = (select(tmp_path, split="train", order=order).records for order in (Order.WORST, Order.BEST))
    assert [each.task[-1] for each in worst] == ["2", "1", "3"]
    assert [each.task[-1] for each in best] == ["3", "1", "2"]
