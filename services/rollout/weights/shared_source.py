"""Fetches each policy version once for all tasks that want it at the same time.

A version is kept only while it is in use, because the store cannot free its bytes until it is released.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.weights.source import Delivery, Entry, WeightsSource
from shared.dataplane.stream import OnProgress, ignore_progress

Key = tuple[int, int, int]
"""Lineage, step and fence."""


class _Fetching:
    """The callers that are waiting for one version. The progress of the fetch is reported to all of them."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting: list[OnProgress] = []

    def on_progress(self) -> None:
        for each in list(self.waiting):
            each()


class SharedSource:
    """A `WeightsSource` on top of another source. The lease being prefetched, the leases waiting for their turn and an
    in-flight swap share one delivery. The source is used only on the service's loop."""

    def __init__(self, source: WeightsSource) -> None:
        self._source = source
        self._here: WeakValueDictionary[Key, Delivery] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[Key, _Fetching] = WeakValueDictionary()

    async def fetch(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Delivery:
        key = (ref.lineage, ref.step, ref.fence)
        fetching = self._fetching.setdefault(key, _Fetching())
        fetching.waiting.append(on_progress)
        try:
            async with fetching.lock:  # if the fetch fails, the next caller repeats it with its own full time limit
                on_progress()
                delivery = self._here.get(key)
                if delivery is None:
                    delivery = self._here[key] = await self._source.fetch(ref, fetching.on_progress)
                return delivery
        finally:
            fetching.waiting.remove(on_progress)

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Delivery:
        return await self._source.from_store(ref, on_progress)

    async def drill(self, engine: Engine, ref: WeightsRef, entry: Entry) -> Delivery:
        return await self._source.drill(engine, ref, entry)
