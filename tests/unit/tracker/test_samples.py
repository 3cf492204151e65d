"""Tests which samples a tracker receives, and in which columns."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.tracker.samples import COLUMNS, is_due, table_of
from shared.runfiles.metrics import CommittedRow
from shared.samples.record import FOLDER, SampleRecord, SampleState, file_of


def row(step: int, **values: float) -> CommittedRow:
    return CommittedRow(position=step, lineage=0, step=step, values=values)


@pytest.mark.parametrize(
    ("every", "recorded", "steps"),
    [
        (10, 1, [10, 20, 30]),
        (10, 7, [14, 21, 35]),  # the first recorded step from 10, 20 and 30 on
        (1, 1, list(range(1, 36))),
        (1, 16, [16, 32]),
        (100, 1, []),
    ],
)
def test_the_first_recorded_step_of_each_interval_is_due(every: int, recorded: int, steps: list[int]) -> None:
    assert [step for step in range(36) if is_due(row(step), every, recorded)] == steps


def test_a_table_has_a_column_for_each_named_reward(tmp_path: Path) -> None:
    records = [
        SampleRecord(
            task="train/0/1", reward=1.0, rewards={"exact": 1.0}, versions=[3, 4], turns=2, finish_reason="stop"
        ),
        SampleRecord(task="train/0/2", state=SampleState.FILTERED, rewards={"short": 0.5}),
        SampleRecord(task="train/0/3", sample=-1),
    ]
    path = tmp_path / FOLDER / file_of("train", 5)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    table = table_of(tmp_path, row(5), 8)
    assert table is not None
    assert table.columns == (*COLUMNS, "reward/exact", "reward/short")
    first, second = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
    wanted = {"state": "trained", "turns": 2, "versions": "3 4", "finish_reason": "stop", "reward/exact": 1.0}
    assert first | wanted == first
    assert (second["state"], second["reward/exact"], second["reward/short"]) == ("filtered", None, 0.5)


def test_a_table_has_no_more_samples_than_the_topology_allows(tmp_path: Path) -> None:
    for split, step in (("train", 5), ("eval/held", 4)):
        path = tmp_path / FOLDER / file_of(split, step)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(msgspec.json.encode(SampleRecord(task="t", split=split)) + b"\n" for _ in range(9)))
    table = table_of(tmp_path, row(5, **{"policy/version": 4.0, "eval/held/accuracy": 1.0}), 3)
    assert table is not None
    assert [cells[0] for cells in table.rows] == ["train"] * 3 + ["eval/held"] * 3
