"""The clears that stores have not acknowledged yet: one ordered queue per store, kept until the store is gone for good.

A clear names `(task, fence)`: the store tombstones it and deletes every shard of the task up to that fence. No clear is
lost or reordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from proto.messages import PutTask

MAX_CLEARS = 1000
"""Maximum number of clears in one message."""

Entry = tuple[str, int, bool]
"""Task id, fence, and whether this is the last clear, after whose acknowledgements the task is COLLECTED."""


class ClearQueues:
    """Clears by store, oldest first."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Entry]] = {}
        self.collected = 0
        """Number of tasks whose last clear was acknowledged by every store that may hold them."""

    @property
    def stores(self) -> list[str]:
        return list(self._queues)

    def add_store(self, store: str) -> None:
        self._queues.setdefault(store, deque())

    def remove_store(self, store: str) -> None:
        """Remove the queue of a store that is gone. Call `pop` for its remaining clears first."""
        del self._queues[store]

    def push(self, task_id: str, fence: int, stores: Iterable[str], *, last: bool) -> None:
        """Queue a clear at each of these stores. Unknown stores are skipped: reconciliation clears what they hold."""
        for store in stores:
            if store in self._queues:
                self._queues[store].append((task_id, fence, last))

    def head(self, store: str) -> list[PutTask]:
        """Return the clears to send next, at most MAX_CLEARS."""
        queue = self._queues[store]
        return [PutTask(task_id, fence) for task_id, fence, _ in islice(queue, MAX_CLEARS)]

    def pop(self, store: str, count: int) -> list[Entry]:
        queue = self._queues[store]
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def pending(self) -> int:
        return sum(map(len, self._queues.values()))

    def pending_at(self, store: str) -> int:
        return len(self._queues[store])

    def entries(self) -> dict[str, list[Entry]]:
        """Return a copy of the queues, by store."""
        return {name: list(queue) for name, queue in self._queues.items()}

    def extend(self, store: str, entries: list[Entry]) -> None:
        """Append entries of a snapshot to the queue of a store."""
        self.add_store(store)
        self._queues[store].extend((task, fence, last) for task, fence, last in entries)
