"""Reads `samples/` in a run directory, possibly while it is being written: torn and damaged lines are skipped."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared import names
from shared.samples.record import EVAL_PREFIX, FOLDER, SUFFIX, SampleRecord, file_of
from shared.stages import TRAIN

_decoder = msgspec.json.Decoder(SampleRecord)


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
