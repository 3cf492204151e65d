"""Newer weights for a block that is being sampled: its samples keep their tokens and go on under the new version from
the next decode step (`services.rollout.in_flight`), with the keys and values that they have cached (`keep`) or with
those of the new version (`recompute`). Must never let a token out that was sampled with weights that were not proved,
nor touch a block that wants one exact version (evaluations).

Generation stands still for the swap and its proof only, not while the weights are fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.transfer import TransferFailed
from services.rollout.versions import BlockVersions
from services.rollout.weights_source import WeightsSource
from services.rollout.weights_sync import WeightsSync
from shared.rpc.errors import RpcError


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
        try:
            delivery = await self._source.fetch(ref)
        except RpcError as error:
            self._emit("weights/in_flight", {"step": ref.step, "missed": str(error)[:200]})  # superseded meanwhile
            return
        async with self.settled():
            if not self._swappable or not self._sync.needs(ref, exact=False):
                return
            if not self._sync.is_drilled(delivery.entry):
                return  # samples are not to take steps with the drill's weights
            began, held = time.perf_counter(), self._sync.holds
            await self._engine.pause()
            try:
                await self._sync.load(ref, delivery)
            except TransferFailed as error:
                self._sync.stays(held)
                await self._engine.resume()
                self._emit("weights/in_flight", {"step": ref.step, "missed": str(error)[:200]})
                return
            for versions in self._under_way:
                versions.replaced(ref.step, self._engine.swaps)
            await self._engine.resume()  # not after another failure: the service ends
            self._emit("weights/in_flight", {"step": ref.step, "pause_s": time.perf_counter() - began})
