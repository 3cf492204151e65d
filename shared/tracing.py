"""Selects the tasks that are traced, and derives the identifiers of their spans.

Every process derives both from the task's id by hashing, so each process reports its own part of a trace and no message
carries a trace context. Identifiers have the sizes of W3C Trace Context: 16 bytes for a trace, 8 for a span.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

MAX_TASKS = 64
"""Maximum number of tasks that one span names."""
_ALL = 1 << 64


def is_traced(task_id: str, share: float) -> bool:
    """Return whether a task belongs to the traced `share` of all tasks, 0 to 1. Every process gives the same answer."""
    return xxhash.xxh3_64_intdigest(task_id.encode()) < share * _ALL


def traced(task_ids: Iterable[str], share: float) -> list[str]:
    """Return the traced tasks among `task_ids`, at most `MAX_TASKS`."""
    if share <= 0:
        return []
    return [task_id for task_id in task_ids if is_traced(task_id, share)][:MAX_TASKS]


def trace_id(run: str, subject: str) -> bytes:
    """Return the trace id for `subject`: a task id, or `step/<step>`."""
    return xxhash.xxh3_128_digest(f"{run}\0{subject}".encode())


def span_id(trace: bytes, *parts: str | int) -> bytes:
    """Return the id of a span within a trace, from the parts that identify it."""
    return xxhash.xxh3_64_digest(trace + "\0".join(map(str, parts)).encode())
