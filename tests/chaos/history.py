"""Checks the records that the processes of one launch wrote (`hook/chaos_history.py`) against the promises."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Task = tuple[str, int]
"""Task id and fence of a shard."""


def read(folder: Path) -> list[Record]:
    """Return the records of all processes, ordered by the time at which the recorded call ended. A line cut off by a
    kill is skipped.
    """
    records = []
    for file in folder.glob("*.jsonl"):
        text = file.read_text()
        records += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return sorted(records, key=lambda record: float(record["at"]))


def violations(records: list[Record], *, resampled: bool = False, damaged: bool = False) -> list[str]:
    """Return one line for each contradiction between the records and the promises.

    `resampled` means that the run went back to an earlier step or lost a lease of a later stage, so that accepted tasks
    were sampled again. `damaged` means that the test destroyed shards, so shards may be missing.
    """
    found = list(_reads_after_collection(records))
    if not damaged:
        found += _lost_puts(records)
    if not resampled and not damaged:
        found += _accepted_again(records)
    return found


def _tasks(record: Record) -> list[Task]:
    return [(task_id, fence) for task_id, fence in record["tasks"]]


def _reads_after_collection(records: list[Record]) -> Iterator[str]:
    collected: dict[str, tuple[int, float]] = {}
    for record in records:
        if record["kind"] == "clear":
            for task_id, fence in _tasks(record):
                if fence > collected.get(task_id, (-1, 0.0))[0]:
                    collected[task_id] = (fence, record["at"])
    for record in records:
        if record["kind"] != "read":
            continue
        for task_id, fence in _tasks(record):
            last, at = collected.get(task_id, (-1, 0.0))
            if last >= fence and at < record["begun"]:
                yield f"{task_id} fence {fence}: read {record['begun'] - at:.3f} s after its collection"


def _lost_puts(records: list[Record]) -> Iterator[str]:
    acknowledged: defaultdict[Task, dict[str, float]] = defaultdict(dict)
    clears: list[tuple[str, int, float]] = []
    for record in records:
        if record["kind"] == "put":
            for task, key in product(_tasks(record), record["keys"]):
                acknowledged[task].setdefault(key, record["at"])
        if record["kind"] == "clear":
            clears += [(task_id, fence, record["begun"]) for task_id, fence in _tasks(record)]
    for record in records:
        if record["kind"] != "refused" or record["code"] != "missing":
            continue
        for task_id, fence in _tasks(record):
            # Shards of a later stage may not have been put yet: the promise covers only shards that have been put. A
            # read without keys is for all shards of the task.
            puts = acknowledged[task_id, fence]
            put_at = max((puts.get(key, math.inf) for key in record["keys"] or puts), default=math.inf)
            cleared = any(each == task_id and last >= fence and at < record["at"] for each, last, at in clears)
            if put_at < record["begun"] and not cleared:
                after_s = record["begun"] - put_at
                yield f"{task_id} fence {fence}: missing {after_s:.3f} s after its put was acknowledged"


def _accepted_again(records: list[Record]) -> Iterator[str]:
    fences: dict[tuple[str, str], int] = {}
    for record in records:
        if record["kind"] == "accepted":
            for task_id, fence in _tasks(record):
                first = fences.setdefault((record["stage"], task_id), fence)
                if first != fence:
                    yield f"{task_id}, stage {record['stage']}: accepted under fence {first} and again under {fence}"


def journal_violations(journal: Path, rows: list[Record], records: list[Record], steps: int) -> list[str]:
    """Return one line for each task that was not trained exactly once and each step that was lost, according to the
    tables and metrics of a finished run."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as tables:
        kept = tables.execute("SELECT step, state, task_ids FROM steps WHERE state <> 'TAKEN_BACK'").fetchall()
    counts = Counter(task_id for _, _, ids in kept for task_id in json.loads(ids))
    found = [f"{task_id}: in {count} steps" for task_id, count in counts.items() if count > 1]
    if sorted(step for step, _, _ in kept) != list(range(1, steps + 1)):
        found.append(f"the journal has steps {sorted(step for step, _, _ in kept)} of a run of {steps} steps")
    written = [int(row["step"]) for row in rows]
    if written != list(range(steps + 1)):
        found.append(f"metrics.jsonl has the rows {written}")
    lost = {record["step"] for record in records if record["kind"] == "commit"} - set(written)
    return found + [f"step {step}: its commit was acknowledged, but it has no row" for step in sorted(lost)]
