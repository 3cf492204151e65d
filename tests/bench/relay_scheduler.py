"""A scheduler that gives stores a different relay order: `python -m tests.bench.relay_scheduler SHAPE --run D`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

from services.scheduler.leases import Holder
from services.scheduler.server import SchedulerService
from services.scheduler.shards import StoredShards
from shared.actor.process import run_process
from shared.rundir import service_name


def predecessors(number: int) -> list[str]:
    """Return the predecessors of a store, nearest first, in a binary tree of stores 1 to N below the trainer's
    store."""
    found = []
    while (number := (number - 1) // 2) > 0:
        found.append(service_name("batch-store", number))
    return found


def tree(_shards: StoredShards, store: Holder, _is_present: Callable[[Holder], bool]) -> list[str]:
    """Return the predecessors of a store in a binary tree."""
    return predecessors(store[1])


def direct(_shards: StoredShards, _store: Holder, _is_present: Callable[[Holder], bool]) -> list[str]:
    """Return no predecessors: every store fetches the version from the trainer's store."""
    return []


if __name__ == "__main__":
    shape = {"tree": tree, "direct": direct}[sys.argv.pop(1)]
    with mock.patch.object(StoredShards, "upstream", shape):
        sys.exit(run_process(SchedulerService, "scheduler"))
