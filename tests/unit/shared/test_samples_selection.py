"""Tests the selection of the samples to show: the order comes before the limit, and no sample is left out silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.recorder.files import SampleFiles
from shared.samples.reader import Order, select
from shared.samples.record import SampleRecord

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


def test_all_samples_of_a_task_are_found_in_all_steps(run: Path) -> None:
    found = select(run, split="train", task="train/1/7", limit=10)
    assert [(each.task, each.step) for each in found.records] == [("train/1/7", 1)]
    assert select(run, split="train", task="train/1/7777").total == 0
