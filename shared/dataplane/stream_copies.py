"""Makes the arrays of one fetch from the streams that bring them. It must never give two fetches the same memory.

A stream's arrays are made while the next streams are under way: at the end there is nobody to share the time with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from proto.messages import PutTask
from proto.tensors import Array
from shared.dataplane.mapping import merged
from shared.dataplane.stream_arrival import Arrived

Held = tuple[Arrived, tuple[str, ...]]
"""Some keys of what arrived; no keys: all of them."""


class Copies:
    """Belongs to one fetch and its event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._whole: dict[Held, asyncio.Future[list[dict[str, Array]]]] = {}

    def begin(self, arrived: Arrived, keys: tuple[str, ...]) -> None:
        """All of `arrived` will be wanted."""
        loop = asyncio.get_running_loop()
        self._whole[arrived, keys] = made = loop.run_in_executor(
            self._threads, _views, arrived, range(len(arrived.table.task_ids)), keys
        )
        made.add_done_callback(_seen)

    async def arrays(
        self, tasks: Sequence[PutTask], order: tuple[str, ...], by_source: dict[Held, list[int]]
    ) -> list[dict[str, Array]]:
        """One dict a task, with keys in that order; `by_source`: places in `tasks` of what each source has."""
        whole = {held: await made for held, made in self._whole.items() if held in by_source}
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, _assemble, tasks, order, by_source, whole
        )


def _views(arrived: Arrived, rows: Sequence[int], keys: tuple[str, ...]) -> list[dict[str, Array]]:
    return arrived.copy().arrays(rows, keys or None)


def _assemble(
    tasks: Sequence[PutTask],
    order: tuple[str, ...],
    by_source: dict[Held, list[int]],
    whole: dict[Held, list[dict[str, Array]]],
) -> list[dict[str, Array]]:
    found: list[dict[str, Array]] = [{} for _ in tasks]
    for (arrived, keys), ats in by_source.items():
        index = arrived.table.index
        rows = [index[tasks[at].task_id, tasks[at].fence] for at in ats]
        made = whole.get((arrived, keys))
        each = _views(arrived, rows, keys) if made is None else [made[row] for row in rows]
        for at, arrays in zip(ats, each, strict=True):
            found[at] = merged(found[at], arrays, order) if found[at] else arrays
    return found


def _seen(made: asyncio.Future[list[dict[str, Array]]]) -> None:
    """A fetch that failed has no use for them."""
    if not made.cancelled():
        made.exception()
