"""Presents a few samples from an evaluated step as a table, for trackers that show tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from services.tracker.history import Row
from shared.samples.plain import conversation
from shared.samples.reader import read
from shared.samples.record import EVAL_PREFIX, Record
from shared.stages import TRAIN

COLUMNS = ("split", "task", "prompt", "completion", "reward", "advantage", "length", "finish_reason")
TEXT_CHARS = 4000
"""Maximum number of characters shown of a prompt or completion. The full text is in `samples/` in the run directory."""
Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Samples from the step that one row describes, in the columns `COLUMNS`."""

    position: int
    step: int
    rows: list[tuple[Cell, ...]]


def is_evaluated(row: Row) -> bool:
    """Return whether the row contains evaluation results."""
    return bool(_sets(row))


def table_of(run: Path, row: Row, count: int) -> Table | None:
    """Return up to `count` samples from the training step and from each of its evaluations, or None if there are
    none."""
    records = read(run, step=row.step, split=TRAIN, limit=count) if row.step > 0 else []
    version = int(row.values.get("policy/version", row.step))
    for name in _sets(row):
        records += read(run, step=version, split=f"{EVAL_PREFIX}{name}", limit=count)
    found = [_cells(record) for record in records if record.sample >= 0]
    return Table(row.position, row.step, found) if found else None


def _sets(row: Row) -> list[str]:
    names = (re.match(rf"{EVAL_PREFIX}([^/]+)/", name) for name in row.values)
    return sorted({match[1] for match in names if match})


def _cells(record: Record) -> tuple[Cell, ...]:
    return (
        record.split,
        record.task,
        conversation(record.prompt)[:TEXT_CHARS],
        record.completion[:TEXT_CHARS],
        record.reward,
        record.advantage,
        record.length,
        record.finish_reason,
    )
