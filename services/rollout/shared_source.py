"""Brings each policy version once for all who want it at the same time. Must never keep one that nobody wants any more:
its store counts it for as long.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.weights_source import Delivery, Entry, WeightsSource
from shared.moved import Moved, nobody

Key = tuple[int, int, int]
"""Lineage, step and fence."""


class _Fetching:
    """Those that wait for one version; what comes of it has come for all of them."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting: list[Moved] = []

    def moved(self) -> None:
        for each in list(self.waiting):
            each()


class SharedSource:
    """A `WeightsSource` over another one. The lease ahead, those that wait for their turn and the swap under running
    samples get the same delivery. Belongs to the service's loop."""

    def __init__(self, source: WeightsSource) -> None:
        self._source = source
        self._here: WeakValueDictionary[Key, Delivery] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[Key, _Fetching] = WeakValueDictionary()

    async def fetch(self, ref: WeightsRef, moved: Moved = nobody) -> Delivery:
        key = (ref.lineage, ref.step, ref.fence)
        fetching = self._fetching.setdefault(key, _Fetching())
        fetching.waiting.append(moved)
        try:
            async with fetching.lock:  # who waits fetches itself if that fails, with all of its time
                moved()
                delivery = self._here.get(key)
                if delivery is None:
                    delivery = self._here[key] = await self._source.fetch(ref, fetching.moved)
                return delivery
        finally:
            fetching.waiting.remove(moved)

    async def from_store(self, ref: WeightsRef, moved: Moved = nobody) -> Delivery:
        return await self._source.from_store(ref, moved)

    async def drill(self, engine: Engine, ref: WeightsRef, entry: Entry) -> Delivery:
        return await self._source.drill(engine, ref, entry)
