"""Decides which policy version the engine holds: the one that a lease needs, or a newer one for running samples.

A lease waits until the leases that need another version have ended, unless the engine can retain their version: each
lease is then sampled with the version with which it began. Newer weights are also loaded into a block that is being
sampled. Its samples keep their tokens and continue under the new version from the next decode step, with their cached
keys and values (`keep`) or with those of the new version (`recompute`). Tokens that were sampled with unproved
weights are never returned, and blocks that require one exact version (evaluations) are not changed.

Generation pauses only for the swap and its proof, not while the weights are fetched or the trainer is asked to send
them. A transfer directly into an engine (vLLM) is part of the swap. If such a transfer fails, the shards are used for
`SHARDS_S` seconds, provided that loading from shards has been drilled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakKeyDictionary

from proto.messages import ErrorCode, WeightsRef
from services.rollout.engine import Engine
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.weights.source import FETCH_S, Delivery, Emit, LoadEntry, WeightsSource
from services.rollout.weights.sync import HeldVersion, SyncReport, WeightsSync
from services.rollout.weights.transfer import TransferFailed
from shared.colocation.devices import ENGINE, WEIGHTS, Parts
from shared.colocation.turns import OwnDevices, Turns
from shared.lease import Lease, LeaseBook
from shared.rpc.errors import RpcError

SHARDS_S = 60.0
"""Number of seconds after a failed transfer during which newer weights are fetched from the store."""
_WEIGHTS: Parts = frozenset({WEIGHTS})


class WeightsGone(Exception):
    """The scheduler cleared a lease's version while the lease was waiting, so the lease's samples would be useless."""


class EngineVersions:
    """The versions of one engine, and its turns on the devices. It is used only on the service's loop."""

    def __init__(
        self,
        leases: LeaseBook,
        *,
        engine: Engine,
        sync: WeightsSync,
        source: WeightsSource,
        turns: Turns,
        emit: Emit,
        in_flight: bool = True,
    ) -> None:
        """`in_flight` says whether running samples get newer weights; `emit(topic, values)` sends telemetry."""
        self._leases = leases
        self._engine = engine
        self._sync = sync
        self._source = source
        self._turns = turns
        self._emit = emit
        self._in_flight = in_flight
        self._taken = False
        self._changed = asyncio.Event()
        self._announced: asyncio.Queue[WeightsRef] = asyncio.Queue(1)
        self._ahead: WeakKeyDictionary[Lease, Delivery] = WeakKeyDictionary()
        """The weights that were fetched for leases that still wait for their turn."""
        self._bringing = 0
        """Number of leases inside `bring`."""
        self._sampled: dict[BlockVersions, bool] = {}
        """The leases that are being sampled, and whether each needs one exact version."""
        self._transfer_from = 0.0
        """Time on the loop's clock from which the trainer is asked to send weights again."""
        leases.blocked_on_devices = lambda: turns.waiting

    @property
    def holds(self) -> HeldVersion:
        """The version that the engine has been proved to hold."""
        return self._sync.holds

    @property
    def last_sync(self) -> SyncReport | None:
        """Report of the sync that brought the newest weights."""
        return self._sync.last

    @property
    def side_by_side(self) -> bool:
        """Whether several leases may be sampled together. A service that takes turns on devices gives the devices back
        between leases."""
        return self._engine.side_by_side and isinstance(self._turns, OwnDevices)

    # ---- leases

    async def fetch_ahead(self, lease: Lease) -> None:
        """Fetch the weights for a lease that is waiting for its turn, if they will be needed."""
        ref = lease.grant.weights
        if ref is not None and self._needs_other(lease):
            self._ahead[lease] = await self._fetch(lease, ref)

    @asynccontextmanager
    async def bring(self, lease: Lease, *, exact: bool) -> AsyncIterator[BlockVersions]:
        """Acquire the devices, load the lease's version if needed, and yield the versions that sample the lease.

        Each swap adds its version to them. If `exact` is true, the first version stays in the engine until the end of
        the `with` block. Raises WeightsGone, and LeaseLost.
        """
        self._bringing += 1
        try:
            versions = await self._acquire(lease, exact=exact)
            try:
                yield versions
            finally:
                self._end(versions)
        finally:
            self._bringing -= 1
            self.rest(but=lease)

    def rest(self, but: Lease | None = None) -> None:
        """Release the devices if no lease needs the engine. `but` is not counted, because it is done."""
        if not self._bringing and all(lease is but for lease in self._leases.uncomputed):
            self._turns.done()

    async def _acquire(self, lease: Lease, *, exact: bool) -> BlockVersions:
        async with self._turn_of(lease):
            # Memory for the weights is acquired first, because the trainer's parameters may stay in memory while the
            # engine takes them over.
            await self._acquire_memory(_WEIGHTS)
            async with self._beside_running(lease):
                placed = await self._load_version(lease)
                await self._acquire_memory(ENGINE)
                if placed or await self._load_version(lease):  # the engine might have slept in the meantime
                    await self._verify_canary(lease)
            self._ahead.pop(lease, None)
            return self._begin(exact=exact)

    @asynccontextmanager
    async def _beside_running(self, lease: Lease) -> AsyncIterator[None]:
        """Pause the samples whose version the engine retains while it loads the lease's version, if it must."""
        if not self._sampled or not self._needs_other(lease):
            yield
            return
        if lease not in self._ahead and lease.grant.weights is not None:  # not to be waited for in the pause
            self._ahead[lease] = await _unless_gone(self._fetch(lease, lease.grant.weights))
        began = time.perf_counter()
        await self._engine.pause()
        try:
            yield
        finally:
            await self._engine.resume()  # in any case, because the samples name a version that has been proved
        self._emit("weights/in_flight", {"step": self.holds.step, "pause_s": time.perf_counter() - began})

    def _begin(self, *, exact: bool) -> BlockVersions:
        """Register a lease that is about to be sampled with the engine's version."""
        versions = BlockVersions(self.holds.step, self._engine.swaps, self.holds.lineage)
        self._sampled[versions] = exact
        return versions

    def _end(self, versions: BlockVersions) -> None:
        """Unregister a lease whose sampling has ended."""
        del self._sampled[versions]
        self._look_again()

    @asynccontextmanager
    async def _turn_of(self, lease: Lease) -> AsyncIterator[None]:
        """Enter `_settled`. If the engine must load another version, first wait until it can retain those of the
        running leases, or until they have ended.

        Raises LeaseLost as soon as the waiting lease is lost.
        """

        def may_begin() -> bool:
            lease.check()
            return not self._needs_other(lease) or self._engine.retain({versions.began for versions in self._sampled})

        async def watch() -> None:
            await lease.given_up.wait()
            self._look_again()

        watching = asyncio.create_task(watch())
        self._leases.queued.add(lease)
        lease.untouched = True
        try:
            async with self._settled(may_begin):
                self._leases.queued.discard(lease)
                lease.untouched = False
                yield
        finally:
            self._leases.queued.discard(lease)
            watching.cancel()

    @asynccontextmanager
    async def _settled(self, may_begin: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
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
            self._look_again()

    def _look_again(self) -> None:
        """Wake the tasks that are waiting in `_settled`: their condition may have become true, or may now raise an
        exception."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _needs_other(self, lease: Lease) -> bool:
        """Return whether the engine must load another version first."""
        ref = lease.grant.weights
        return ref is not None and self._sync.needs(ref, exact=lease.grant.exact)

    async def _acquire_memory(self, parts: Parts) -> None:
        """Acquire memory for `parts` of the engine."""
        await self._turns.acquire(parts)
        await self._engine.wake(parts)

    async def _load_version(self, lease: Lease) -> bool:
        """Load the lease's version into the engine. Return False if the engine already holds it."""
        ref = lease.grant.weights
        if ref is None or not self._needs_other(lease):
            return False
        # Nothing was fetched ahead if the engine held this version at that time and has replaced it since.
        delivery = self._ahead.pop(lease, None) or await _unless_gone(self._fetch(lease, ref))
        try:
            await self._sync.place(ref, delivery)
        except TransferFailed:
            await self._sync.place(ref, await _unless_gone(self._fetch(lease, ref, from_store=True)))
        return True

    async def _verify_canary(self, lease: Lease) -> None:
        """Check that the engine holds the weights that were placed."""
        ref = lease.grant.weights
        try:
            await self._sync.prove()
        except TransferFailed:
            if ref is None:
                raise
            await self._sync.load(ref, await _unless_gone(self._fetch(lease, ref, from_store=True)))

    async def _fetch(self, lease: Lease, ref: WeightsRef, *, from_store: bool = False) -> Delivery:
        fetch = self._source.from_store if from_store else self._source.fetch
        return await self._leases.persist(lease, "weights", partial(fetch, ref), FETCH_S)

    # ---- running samples

    def announce(self, ref: WeightsRef) -> None:
        """Announce a newer version. If it cannot be used now, it is forgotten until the next announcement."""
        if self._in_flight and self._swappable and not self._announced.full():
            self._announced.put_nowait(ref)

    @property
    def _swappable(self) -> bool:
        return bool(self._sampled) and not any(self._sampled.values())

    async def run(self) -> None:
        """Replace running samples' weights with announced ones until cancelled. Raises RpcError(conflict), and leaves
        generation paused, if the engine and the trainer disagree."""
        while True:
            await self._update(await self._announced.get())

    async def _update(self, ref: WeightsRef) -> None:
        clock = asyncio.get_running_loop().time
        if clock() >= self._transfer_from:
            if await self._try_to_load(ref, self._source.fetch):
                return
            self._transfer_from = clock() + SHARDS_S
        if self._can_use(ref, LoadEntry.SET):  # otherwise the whole version would be fetched for nothing
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

    def _can_use(self, ref: WeightsRef, entry: LoadEntry) -> bool:
        """Return whether to load this version now. An entry that has not been drilled is not used."""
        return self._swappable and self._sync.needs(ref, exact=False) and self._sync.is_drilled(entry)

    async def _swap(self, ref: WeightsRef, delivery: Delivery) -> None:
        """Load the delivery while generation is paused. Raises TransferFailed, which leaves the engine unchanged."""
        async with self._settled():
            if not self._can_use(ref, delivery.entry):
                delivery.decline()
                return
            began, before = time.perf_counter(), self.holds
            await self._engine.pause()
            try:
                await self._sync.load(ref, delivery)
            except TransferFailed:
                self._sync.stays(before)
                await self._engine.resume()
                raise
            for versions in self._sampled:
                versions.replaced(ref.step, self._engine.swaps)
            await self._engine.resume()  # not after any other error, which ends the service
            self._emit("weights/in_flight", {"step": ref.step, "pause_s": time.perf_counter() - began})

    def _missed(self, ref: WeightsRef, error: Exception) -> None:
        self._emit("weights/in_flight", {"step": ref.step, "missed": str(error)[:200]})


async def _unless_gone(fetching: Awaitable[Delivery]) -> Delivery:
    try:
        return await fetching
    except RpcError as error:
        if error.code in (ErrorCode.MISSING, ErrorCode.COLLECTED):
            raise WeightsGone(str(error)) from None
        raise
