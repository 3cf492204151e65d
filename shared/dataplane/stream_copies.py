"""Makes the arrays of one fetch from the streams that bring them. It must never give two fetches the same memory.

A stream's arrays are made while the next streams are under way: at the end there is nobody to share the time with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from concurrent.futures import Executor
from itertools import chain

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

    def begin(self, arrived: Arrived, keys: tuple[str, ...], kept: bool) -> None:
        """This fetch brought `arrived` and will want all of it; `kept`: others may, too."""
        loop = asyncio.get_running_loop()
        self._whole[arrived, keys] = made = loop.run_in_executor(self._threads, _first, arrived, keys, kept)
        made.add_done_callback(_seen)

    async def in_order(self, pieces: Sequence[Arrived], keys: tuple[str, ...], shared: bool) -> list[dict[str, Array]]:
        """All `keys` of all tasks that this fetch brought, one dict each; `shared`: others wait for them, too."""
        made = [await self._whole[arrived, keys] for arrived in pieces]
        if shared:
            await asyncio.get_running_loop().run_in_executor(self._threads, _leave_copies, pieces)
        for arrived in pieces:
            arrived.hand_out()
        return list(chain.from_iterable(made))

    async def arrays(
        self,
        tasks: Sequence[PutTask],
        order: tuple[str, ...],
        by_source: dict[Held, list[int]],
        shared: Set[Arrived],
    ) -> list[dict[str, Array]]:
        """One dict a task, with keys in that order; `by_source`: places in `tasks` of what each source has.

        `shared`: what this fetch brought and others wait for.
        """
        whole = {held: await made for held, made in self._whole.items() if held in by_source}
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, _assemble, tasks, order, by_source, whole, shared
        )


def _first(arrived: Arrived, keys: tuple[str, ...], kept: bool) -> list[dict[str, Array]]:
    if kept:
        arrived.leave_copy()
    return arrived.first(range(len(arrived.table.task_ids)), keys or None)


def _leave_copies(pieces: Sequence[Arrived]) -> None:
    for arrived in pieces:
        arrived.leave_copy()


def _assemble(
    tasks: Sequence[PutTask],
    order: tuple[str, ...],
    by_source: dict[Held, list[int]],
    whole: dict[Held, list[dict[str, Array]]],
    shared: Set[Arrived],
) -> list[dict[str, Array]]:
    found: list[dict[str, Array]] = [{} for _ in tasks]
    for (arrived, keys), ats in by_source.items():
        index = arrived.table.index
        rows = [index[tasks[at].task_id, tasks[at].fence] for at in ats]
        made = whole.get((arrived, keys))
        each = arrived.copies(rows, keys or None) if made is None else [made[row] for row in rows]
        for at, arrays in zip(ats, each, strict=True):
            found[at] = merged(found[at], arrays, order) if found[at] else arrays
    for arrived, _ in whole:
        if arrived in shared:
            arrived.leave_copy()
        arrived.hand_out()
    return found


def _seen(made: asyncio.Future[list[dict[str, Array]]]) -> None:
    """A fetch that failed has no use for them."""
    if not made.cancelled():
        made.exception()
