"""Newer weights for a block that is being sampled: its samples keep their tokens and go on under the new version from
the next decode step (`services.rollout.in_flight`), with the keys and values that they have cached (`keep`) or with
those of the new version (`recompute`). Must never let a token out that was sampled with weights that were not proved,
nor touch a block that wants one exact version (evaluations).

Generation stands still for the swap and its proof only: never while the weights are fetched, nor while the trainer is
asked to send them. What it sends right into an engine (vLLM) is part of the swap. If that does not come, the shards are
taken for `SHARDS_S`, where this way in was drilled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.transfer import TransferFailed
from services.rollout.versions import BlockVersions
from services.rollout.weights_source import Delivery, Entry, WeightsSource
from services.rollout.weights_sync import WeightsSync
from shared.rpc.errors import RpcError

SHARDS_S = 60.0
"""After a transfer that failed newer weights are taken from the store for so long."""


class InFlight:
    """Belongs to the service's loop. `run` must run for announcements to have an effect."""

    def __init__(
        self,
        engine: Engine,
        sync: WeightsSync,
        source: WeightsSource,
        emit: Callable[[str, dict[str, float | str]], None],
    ) -> None:
        """`emit(topic, values)`: telemetry."""
        self._engine = engine
        self._sync = sync
        self._source = source
        self._emit = emit
        self._taken = False
        self._changed = asyncio.Event()
        self._announced: asyncio.Queue[WeightsRef] = asyncio.Queue(1)
        self._under_way: dict[BlockVersions, bool] = {}
        """Leases that are being sampled, and whether they want one exact version."""
        self._sent_from = 0.0
        """When the trainer is to send again, by the loop's clock."""

    @asynccontextmanager
    async def settled(self, may_begin: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """No swap begins or goes on inside: for whoever loads weights, and looks at what the engine holds.

        Waits until nobody else is inside and `may_begin` holds. What that raises ends the wait, whoever is inside:
        nobody is ever kept by somebody who hangs there.
        """
        while not may_begin() or self._taken:
            await self._changed.wait()
        self._taken = True
        try:
            yield
        finally:
            self._taken = False
            self.look_again()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being sampled."""
        return not self._under_way

    def look_again(self) -> None:
        """What `settled` waits for may hold now, or raise."""
        self._changed.set()
        self._changed = asyncio.Event()

    def begin(self, version: int, *, exact: bool) -> BlockVersions:
        """A lease is about to be sampled with `version`; inside `settled`. Grows by each version that replaces it."""
        versions = BlockVersions(version, self._engine.swaps)
        self._under_way[versions] = exact
        return versions

    def end(self, versions: BlockVersions) -> None:
        """That lease is done."""
        del self._under_way[versions]
        self.look_again()

    def announce(self, ref: WeightsRef) -> None:
        """The scheduler has a newer version. Said again and again: one that cannot be used now is forgotten."""
        if self._swappable and not self._announced.full():
            self._announced.put_nowait(ref)

    @property
    def _swappable(self) -> bool:
        return bool(self._under_way) and not any(self._under_way.values())

    async def run(self) -> None:
        """Work until cancelled. Raises RpcError(conflict), generation held, when engine and trainer disagree."""
        while True:
            await self._update(await self._announced.get())

    async def _update(self, ref: WeightsRef) -> None:
        clock = asyncio.get_running_loop().time
        if clock() >= self._sent_from:
            if await self._comes(ref, self._source.fetch):
                return
            self._sent_from = clock() + SHARDS_S
        if self._can_use(ref, Entry.SET):  # before all of it is brought for nothing
            await self._comes(ref, self._source.from_store)

    async def _comes(self, ref: WeightsRef, fetch: Callable[[WeightsRef], Awaitable[Delivery]]) -> bool:
        """False: it was to be sent and did not come; the samples go on as they did."""
        try:
            delivery = await fetch(ref)
        except RpcError as error:
            self._missed(ref, error)  # superseded meanwhile
            return True
        if not self._can_use(ref, delivery.entry):
            return True
        try:
            await delivery.begin()
            await self._swap(ref, delivery)
        except TransferFailed as error:
            self._missed(ref, error)
            return not self._can_use(ref, delivery.entry)  # or a lease has brought it meanwhile
        return True

    def _can_use(self, ref: WeightsRef, entry: Entry) -> bool:
        """Samples are not to take steps with the drill's weights."""
        return self._swappable and self._sync.needs(ref, exact=False) and self._sync.is_drilled(entry)

    async def _swap(self, ref: WeightsRef, delivery: Delivery) -> None:
        """Raises TransferFailed: the engine goes on as it was."""
        async with self.settled():
            if not self._can_use(ref, delivery.entry):
                delivery.decline()
                return
            began, held = time.perf_counter(), self._sync.holds
            await self._engine.pause()
            try:
                await self._sync.load(ref, delivery)
            except TransferFailed:
                self._sync.stays(held)
                await self._engine.resume()
                raise
            for versions in self._under_way:
                versions.replaced(ref.step, self._engine.swaps)
            await self._engine.resume()  # not after another failure: the service ends
            self._emit("weights/in_flight", {"step": ref.step, "pause_s": time.perf_counter() - began})

    def _missed(self, ref: WeightsRef, error: Exception) -> None:
        self._emit("weights/in_flight", {"step": ref.step, "missed": str(error)[:200]})
