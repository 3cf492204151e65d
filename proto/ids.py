"""Names of tasks and shards, and numbers of incarnations."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from proto.errors import WireError

MAX_NAME_BYTES = 255
REVISION = ":"
"""Separator between the shard name and its revision in a shard key."""
_TASK = re.compile(r"[A-Za-z0-9_.:-]+/[0-9]+/[0-9]+")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]*")


def check_task_id(task_id: str) -> str:
    """Return `task_id` unchanged. Raises WireError if it does not have the form `<split>/<epoch>/<index>`."""
    if len(task_id) > MAX_NAME_BYTES or not _TASK.fullmatch(task_id):
        raise WireError(f"task id {task_id[:80]!r}: must be <split>/<epoch>/<index>, <= {MAX_NAME_BYTES} bytes")
    return task_id


def check_task_ids(task_ids: Sequence[str]) -> None:
    """Apply `check_task_id` to each of `task_ids`."""
    if not all(map(_TASK.fullmatch, task_ids)) or max(map(len, task_ids), default=0) > MAX_NAME_BYTES:
        for task_id in task_ids:
            check_task_id(task_id)


def check_key(key: str) -> str:
    """Return `key` unchanged. Raises WireError if it is not a shard key."""
    if len(key) > MAX_NAME_BYTES or not _KEY.fullmatch(key):
        raise WireError(f"shard key {key[:80]!r}: must match {_KEY.pattern}, <= {MAX_NAME_BYTES} bytes")
    return key


def revised_name(key: str) -> str | None:
    """Return the shard name of a key that has a revision, or None for a key without a revision."""
    name, colon, _ = key.partition(REVISION)
    return name if colon else None


def make_task_id(split: str, epoch: int, index: int) -> str:
    """Return the id of the task for row `index` of `split` in `epoch` (for evaluations, the policy version)."""
    return f"{split}/{epoch}/{index}"


def split_task_id(task_id: str) -> tuple[str, int, int]:
    """Return the split, epoch and index of a task id made by `make_task_id`. Raises WireError."""
    check_task_id(task_id)
    split, epoch, index = task_id.rsplit("/", 2)
    return split, int(epoch), int(index)


def new_incarnation() -> int:
    """Return a random 63-bit number that identifies one incarnation of a process."""
    return secrets.randbits(63) | 1
