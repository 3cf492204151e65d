"""Names of things: shards, tasks, versions, service instances. Never a step, a batch size or an offset."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from proto.errors import WireError

MAX_NAME_BYTES = 255
REVISION = ":"
"""In a shard key: what stands before it names the shard, what stands behind it which making of it this is."""
_TASK = re.compile(r"[A-Za-z0-9_.:-]+/[0-9]+/[0-9]+")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]*")


@dataclass(frozen=True, slots=True)
class ShardId:
    """One tensor of one task.

    `task_id` is `"<split>/<epoch>/<index>"` (or `"weights/<lineage>/<step>"`), `key` the tensor's name in it.
    """

    task_id: str
    key: str

    def __post_init__(self) -> None:
        check_task_id(self.task_id)
        check_key(self.key)

    def __str__(self) -> str:
        return f"{self.task_id}#{self.key}"


def check_task_id(task_id: str) -> str:
    """Return `task_id` unchanged, or raise WireError when it is not `<split>/<epoch>/<index>`."""
    if len(task_id) > MAX_NAME_BYTES or not _TASK.fullmatch(task_id):
        raise WireError(f"task id {task_id[:80]!r}: must be <split>/<epoch>/<index>, <= {MAX_NAME_BYTES} bytes")
    return task_id


def check_task_ids(task_ids: Sequence[str]) -> None:
    """As `check_task_id` for each of many."""
    if not all(map(_TASK.fullmatch, task_ids)) or max(map(len, task_ids), default=0) > MAX_NAME_BYTES:
        for task_id in task_ids:
            check_task_id(task_id)


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise WireError when it is not a shard key."""
    if len(key) > MAX_NAME_BYTES or not _KEY.fullmatch(key):
        raise WireError(f"shard key {key[:80]!r}: must match {_KEY.pattern}, <= {MAX_NAME_BYTES} bytes")
    return key


def revised_name(key: str) -> str | None:
    """What a key with a revision is a making of; None for a key without one."""
    name, colon, _ = key.partition(REVISION)
    return name if colon else None


def make_task_id(split: str, epoch: int, index: int) -> str:
    """Name the task for row `index` of `split` in `epoch` (an evaluation's policy version stands for the epoch)."""
    return f"{split}/{epoch}/{index}"


def split_task_id(task_id: str) -> tuple[str, int, int]:
    """Inverse of `make_task_id`. Raises WireError."""
    check_task_id(task_id)
    split, epoch, index = task_id.rsplit("/", 2)
    return split, int(epoch), int(index)


def new_incarnation() -> int:
    """A fresh 63-bit number that tells one life of a process from the next."""
    return secrets.randbits(63) | 1
