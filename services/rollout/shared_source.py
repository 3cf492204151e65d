"""Brings each policy version once for all who want it at the same time. Must never keep one that nobody wants any more:
its store counts it for as long.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.weights_source import Delivery, Entry, WeightsSource

Key = tuple[int, int, int]
"""Lineage, step and fence."""


class SharedSource:
    """A `WeightsSource` over another one. The lease ahead, those that wait for their turn and the swap under running
    samples get the same delivery. Belongs to the service's loop."""

    def __init__(self, source: WeightsSource) -> None:
        self._source = source
        self._here: WeakValueDictionary[Key, Delivery] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, ref: WeightsRef) -> Delivery:
        key = (ref.lineage, ref.step, ref.fence)
        async with self._fetching.setdefault(key, asyncio.Lock()):  # who waits fetches itself if that fails
            delivery = self._here.get(key)
            if delivery is None:
                delivery = self._here[key] = await self._source.fetch(ref)
            return delivery

    async def from_store(self, ref: WeightsRef) -> Delivery:
        return await self._source.from_store(ref)

    async def drill(self, engine: Engine, ref: WeightsRef, entry: Entry) -> Delivery:
        return await self._source.drill(engine, ref, entry)
