"""Reads `samples/` in a run directory, possibly while it is being written: torn and damaged lines are skipped.

`select` returns the samples to show, in an order, with the number of samples left out.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from shared import names
from shared.samples.record import EVAL_PREFIX, FOLDER, SUFFIX, SampleRecord, file_of, rank
from shared.stages import TRAIN

_decoder = msgspec.json.Decoder(SampleRecord)


class Order(StrEnum):
    """The samples that are shown first."""

    WORST = "worst"
    BEST = "best"
    LONGEST = "longest"


_KEYS: dict[Order | None, Callable[[SampleRecord], float]] = {
    None: lambda record: 0.0,
    Order.WORST: rank,
    Order.BEST: lambda record: -rank(record),
    Order.LONGEST: lambda record: -record.length,
}


@dataclass(frozen=True)
class SampleSelection:
    """The first samples in some order."""

    records: list[SampleRecord]
    total: int
    """Number of samples that match, including those beyond the limit."""

    @property
    def shown(self) -> str:
        """How many samples are shown: `3 samples`, or `the first 3 of 7 samples`."""
        count, total = len(self.records), f"{self.total:,} sample{'' if self.total == 1 else 's'}"
        return total if count == self.total else f"the first {count:,} of {total}"


def splits(run: Path) -> list[str]:
    """Return the splits that have samples: "train" first, then "eval/<set>" by name."""
    evals = names.listed((run / FOLDER / EVAL_PREFIX.rstrip("/")).glob("*"))
    all_splits = [TRAIN, *sorted(f"{EVAL_PREFIX}{path.name}" for path in evals)]
    return [split for split in all_splits if any((run / FOLDER / split).glob(f"*{SUFFIX}"))]


def steps(run: Path, split: str = TRAIN) -> list[int]:
    """Return the steps that have samples, ascending. For an evaluation, return the policy versions instead."""
    if not _is_split(split):
        return []
    try:
        files = os.listdir(run / FOLDER / split)
    except OSError:
        return []
    steps_of_files = (names.number(file.removesuffix(SUFFIX)) for file in files if file.endswith(SUFFIX))
    return sorted(step for step in steps_of_files if step is not None)


def read(
    run: Path, *, step: int | None = None, task: str | None = None, split: str = TRAIN, limit: int | None = None
) -> list[SampleRecord]:
    """Return the records of a split, for one step or all steps, and for one task or all tasks.

    They are in step order, and within a step in the order in which they were written. With `limit`, at most `limit`
    records are returned, from the newest steps.
    """
    by_step: list[list[SampleRecord]] = []
    missing = limit
    for number in reversed(_chosen(run, step, split)):
        if missing is not None and missing <= 0:
            break
        records = list(itertools.islice(_records(run / FOLDER / file_of(split, number), task), missing))
        by_step.append(records)
        missing = None if missing is None else missing - len(records)
    return [record for records in reversed(by_step) for record in records]


def every(run: Path, *, step: int | None = None, task: str | None = None, split: str = TRAIN) -> Iterator[SampleRecord]:
    """Yield the records that `read` returns without a limit, in the same order, one at a time."""
    for number in _chosen(run, step, split):
        yield from _records(run / FOLDER / file_of(split, number), task)


def select(
    run: Path,
    *,
    split: str,
    step: int | None = None,
    task: str | None = None,
    order: Order | None = None,
    limit: int | None = None,
) -> SampleSelection:
    """Return the first `limit` samples of one step or all steps, and of one task or all tasks.

    All matching samples are put in order before the limit applies. No more than `limit` of them are held in memory. If
    `order` is None, they stay in the order in which they were written. Otherwise, the records of tasks that ended
    without samples are left out.
    """
    total = 0

    def matching() -> Iterator[SampleRecord]:
        nonlocal total
        for record in every(run, step=step, task=task, split=split):
            if order is None or record.sample >= 0:
                total += 1
                yield record

    # Equal keys keep their order.
    chosen = heapq.nsmallest(sys.maxsize if limit is None else limit, matching(), key=_KEYS[order])
    return SampleSelection(chosen, total)


def _chosen(run: Path, step: int | None, split: str) -> list[int]:
    return steps(run, split) if step is None or not _is_split(split) else [step]


def _is_split(split: str) -> bool:
    """Return whether `split`, which may come from an untrusted request, is the name of a split and leads to no other
    folder."""
    name = split.removeprefix(EVAL_PREFIX)
    return split == TRAIN or (name != split and "/" not in name and name not in ("", ".", ".."))


def _records(path: Path, task: str | None) -> Iterator[SampleRecord]:
    """Yield the records in a file, which may have been removed in the meantime."""
    wanted = b"" if task is None else b'{"task":' + msgspec.json.encode(task) + b","
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not line.startswith(wanted):
                continue
            with contextlib.suppress(msgspec.DecodeError):
                yield _decoder.decode(line)
