"""Presents a few samples of a step and of its evaluations as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.runfiles.metrics import CommittedRow
from shared.samples.reader import read
from shared.samples.record import EVAL_PREFIX, SampleRecord, conversation
from shared.stages import TRAIN

COLUMNS = (
    *("split", "task", "state", "prompt", "completion", "length", "finish_reason", "turns", "versions", "advantage"),
    "reward",
)
"""Columns of every table. A column `reward/<name>` for each reward that has a name follows them."""
TEXT_CHARS = 4000
"""Maximum number of characters shown of a prompt or completion. The full text is in `samples/` in the run directory."""
Cell = str | float | int | None


@dataclass(frozen=True)
class SampleTable:
    """Samples from the step that one row describes."""

    position: int
    step: int
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


def is_evaluated(row: CommittedRow) -> bool:
    """Return whether the row contains evaluation results."""
    return bool(_sets(row))


def is_due(row: CommittedRow, every: int, recorded: int) -> bool:
    """Return whether the row's step is the first step with recorded training samples in an interval of `every` steps.

    Only steps that are multiples of `recorded` have such samples.
    """
    step = row.step
    return step > 0 and step % recorded == 0 and step // every != (step - recorded) // every


def table_of(run: Path, row: CommittedRow, count: int) -> SampleTable | None:
    """Return up to `count` samples from the training step and from each of its evaluations, or None if there are
    none."""
    records = read(run, step=row.step, split=TRAIN, limit=count) if row.step > 0 else []
    version = int(row.values.get("policy/version", row.step))
    for name in _sets(row):
        records += read(run, step=version, split=f"{EVAL_PREFIX}{name}", limit=count)
    records = [record for record in records if record.sample >= 0]
    if not records:
        return None
    names = sorted({name for record in records for name in record.rewards})
    columns = (*COLUMNS, *(f"reward/{name}" for name in names))
    return SampleTable(row.position, row.step, columns, [_cells(record, names) for record in records])


def _sets(row: CommittedRow) -> list[str]:
    names = (re.match(rf"{EVAL_PREFIX}([^/]+)/", name) for name in row.values)
    return sorted({match[1] for match in names if match})


def _cells(record: SampleRecord, rewards: Sequence[str]) -> tuple[Cell, ...]:
    as_text = {
        "state": str(record.state),
        "prompt": conversation(record.prompt)[:TEXT_CHARS],
        "completion": record.completion[:TEXT_CHARS],
        "versions": " ".join(map(str, record.versions)),
    }
    cells = (as_text[name] if name in as_text else getattr(record, name) for name in COLUMNS)
    return (*cells, *(record.rewards.get(name) for name in rewards))
