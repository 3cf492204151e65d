"""Loads newer weights into a block that is being sampled.

The samples keep their tokens and continue under the new version from the next decode step
(`services.rollout.in_flight`), with their cached keys and values (`keep`) or with those of the new version
(`recompute`). Tokens that were sampled with unproved weights are never returned, and blocks that require one exact
version (evaluations) are not changed.

Generation pauses only for the swap and its proof, not while the weights are fetched or the trainer is asked to send
them. A transfer directly into an engine (vLLM) is part of the swap. If such a transfer fails, the shards are used for
`SHARDS_S` seconds, provided that loading from shards has been drilled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proto.messages import WeightsRef
from services.rollout.engine import Engine
from services.rollout.weights.source import Delivery, Entry, WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import TransferFailed
from services.rollout.weights.versions import BlockVersions
from shared.rpc.errors import RpcError

SHARDS_S = 60.0
"""Number of seconds after a failed transfer during which newer weights are fetched from the store."""


class InFlight:
    """Replaces running samples' weights with announced ones while `run` is active. It is used only on the service's
    loop."""

    def __init__(
        self,
        engine: Engine,
        sync: WeightsSync,
        source: WeightsSource,
        emit: Callable[[str, dict[str, float | str]], None],
    ) -> None:
        """`emit(topic, values)` sends telemetry."""
        self._engine = engine
        self._sync = sync
        self._source = source
        self._emit = emit
        self._taken = False
        self._changed = asyncio.Event()
        self._announced: asyncio.Queue[WeightsRef] = asyncio.Queue(1)
        self._under_way: dict[BlockVersions, bool] = {}
        """The leases that are being sampled, and whether each needs one exact version."""
        self._transfer_from = 0.0
        """Time on the loop's clock from which the trainer is asked to send weights again."""

    @asynccontextmanager
    async def settled(self, may_begin: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Prevent swaps while weights are loaded or the engine's version is read.

        Waits until no other task is inside this context and `may_begin` returns True. An exception from `may_begin`
        ends the wait even while another task is inside, so a task that hangs inside does not hold up the waiting tasks.
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
        """Whether no lease is being sampled."""
        return not self._under_way

    def look_again(self) -> None:
        """Wake the tasks that are waiting in `settled`: their condition may have become true, or may now raise an
        exception."""
        self._changed.set()
        self._changed = asyncio.Event()

    def begin(self, version: int, *, exact: bool) -> BlockVersions:
        """Register a lease that is about to be sampled with `version`. Call this inside `settled`.

        Each swap adds its version to the result.
        """
        versions = BlockVersions(version, self._engine.swaps)
        self._under_way[versions] = exact
        return versions

    def end(self, versions: BlockVersions) -> None:
        """Unregister a lease whose sampling has ended."""
        del self._under_way[versions]
        self.look_again()

    def announce(self, ref: WeightsRef) -> None:
        """Announce a newer version. If it cannot be used now, it is forgotten until the next announcement."""
        if self._swappable and not self._announced.full():
            self._announced.put_nowait(ref)

    @property
    def _swappable(self) -> bool:
        return bool(self._under_way) and not any(self._under_way.values())

    async def run(self) -> None:
        """Work until cancelled. Raises RpcError(conflict), and leaves generation paused, if the engine and the trainer
        disagree."""
        while True:
            await self._update(await self._announced.get())

    async def _update(self, ref: WeightsRef) -> None:
        clock = asyncio.get_running_loop().time
        if clock() >= self._transfer_from:
            if await self._try_to_load(ref, self._source.fetch):
                return
            self._transfer_from = clock() + SHARDS_S
        if self._can_use(ref, Entry.SET):  # otherwise the whole version would be fetched for nothing
            await self._try_to_load(ref, self._source.from_store)

    async def _try_to_load(self, ref: WeightsRef, fetch: Callable[[WeightsRef], Awaitable[Delivery]]) -> bool:
        """Load a version, or leave the samples as they are. Return False if a transfer failed and the version is still
        needed."""
        try:
            delivery = await fetch(ref)
        except RpcError as error:
            self._missed(ref, error)  # the version was superseded in the meantime
            return True
        if not self._can_use(ref, delivery.entry):
            return True
        try:
            await delivery.begin()
            await self._swap(ref, delivery)
        except TransferFailed as error:
            self._missed(ref, error)
            return not self._can_use(ref, delivery.entry)  # a lease might have loaded the version in the meantime
        return True

    def _can_use(self, ref: WeightsRef, entry: Entry) -> bool:
        """Return whether to load this version now. An entry that has not been drilled is not used."""
        return self._swappable and self._sync.needs(ref, exact=False) and self._sync.is_drilled(entry)

    async def _swap(self, ref: WeightsRef, delivery: Delivery) -> None:
        """Load the delivery while generation is paused. Raises TransferFailed, which leaves the engine unchanged."""
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
            await self._engine.resume()  # not after any other error, which ends the service
            self._emit("weights/in_flight", {"step": ref.step, "pause_s": time.perf_counter() - began})

    def _missed(self, ref: WeightsRef, error: Exception) -> None:
        self._emit("weights/in_flight", {"step": ref.step, "missed": str(error)[:200]})
