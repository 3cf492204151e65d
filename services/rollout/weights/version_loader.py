"""Brings the version that a lease needs into the engine: fetches it, loads it and proves that it was loaded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proto.messages import ErrorCode, WeightsRef
from services.rollout.engine import Engine
from services.rollout.weights.in_flight import InFlight
from services.rollout.weights.source import FETCH_S, Delivery, WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import TransferFailed
from services.rollout.weights.versions import BlockVersions
from shared.colocation.devices import ENGINE, WEIGHTS, Parts
from shared.colocation.turns import Turns
from shared.lease import Lease, LeaseBook
from shared.rpc.errors import RpcError

_WEIGHTS: Parts = frozenset({WEIGHTS})


class WeightsGone(Exception):
    """The scheduler cleared a lease's version while the lease was waiting, so the lease's samples would be useless."""


@dataclass
class Fetched:
    """The weights fetched for a lease. `delivery` is None if the engine already held the lease's version or has since
    loaded it."""

    delivery: Delivery | None = None


class VersionLoader:
    """Manages the engine's version for leases that are sampled one after another or side by side."""

    def __init__(
        self,
        leases: LeaseBook,
        *,
        engine: Engine,
        sync: WeightsSync,
        source: WeightsSource,
        in_flight: InFlight,
        turns: Turns,
    ) -> None:
        self._leases = leases
        self._engine = engine
        self._sync = sync
        self._source = source
        self._in_flight = in_flight
        self._turns = turns

    async def fetch_ahead(self, lease: Lease) -> Fetched:
        """Fetch the weights for a lease that is waiting for its turn, if they will be needed."""
        ref = lease.grant.weights
        return Fetched(await self._fetch(lease, ref) if ref is not None and self._needs_other(lease) else None)

    async def acquire(self, lease: Lease, fetched: Fetched, *, exact: bool) -> tuple[BlockVersions, int]:
        """Load the lease's version if needed, and register the lease as being sampled. Return its versions and their
        lineage.

        If `exact` is true, that version stays in the engine until `release` is called. Raises WeightsGone, and
        LeaseLost.
        """
        async with self._settled(lease):
            # Memory for the weights is acquired first, because the trainer's parameters may stay in memory while the
            # engine takes them over.
            await self._acquire_memory(_WEIGHTS)
            placed = await self._load_version(lease, fetched)
            await self._acquire_memory(ENGINE)
            if placed or await self._load_version(lease, fetched):  # the engine might have slept in the meantime
                await self._verify_canary(lease)
            fetched.delivery = None
            return self._in_flight.begin(self._sync.holds.step, exact=exact), self._sync.holds.lineage

    def release(self, versions: BlockVersions) -> None:
        """Unregister a lease whose sampling has ended."""
        self._in_flight.end(versions)

    @asynccontextmanager
    async def _settled(self, lease: Lease) -> AsyncIterator[None]:
        """Enter `InFlight.settled`. If the engine must load another version, first wait for the running leases to end.

        Raises LeaseLost as soon as the waiting lease is lost.
        """

        def may_begin() -> bool:
            lease.check()
            return self._in_flight.is_quiet or not self._needs_other(lease)

        async def watch() -> None:
            await lease.given_up.wait()
            self._in_flight.look_again()

        watching = asyncio.create_task(watch())
        self._leases.queued.add(lease)
        lease.untouched = True
        try:
            async with self._in_flight.settled(may_begin):
                self._leases.queued.discard(lease)
                lease.untouched = False
                yield
        finally:
            self._leases.queued.discard(lease)
            watching.cancel()

    def _needs_other(self, lease: Lease) -> bool:
        """Return whether the engine must load another version first."""
        ref = lease.grant.weights
        return ref is not None and self._sync.needs(ref, exact=lease.grant.exact)

    async def _acquire_memory(self, parts: Parts) -> None:
        """Acquire memory for `parts` of the engine."""
        await self._turns.acquire(parts)
        await self._engine.wake(parts)

    async def _load_version(self, lease: Lease, fetched: Fetched) -> bool:
        """Load the lease's version into the engine. Return False if the engine already holds it."""
        ref = lease.grant.weights
        if ref is None or not self._needs_other(lease):
            return False
        # There is no delivery if the engine held this version when the lease was prepared and has replaced it since.
        delivery = fetched.delivery or await _unless_gone(self._fetch(lease, ref))
        fetched.delivery = None
        try:
            await self._sync.place(ref, delivery)
        except TransferFailed:
            await self._sync.place(ref, await _unless_gone(self._from_store(lease, ref)))
        return True

    async def _verify_canary(self, lease: Lease) -> None:
        """Check that the engine holds the weights that were placed."""
        ref = lease.grant.weights
        try:
            await self._sync.prove()
        except TransferFailed:
            if ref is None:
                raise
            await self._sync.load(ref, await _unless_gone(self._from_store(lease, ref)))

    async def _fetch(self, lease: Lease, ref: WeightsRef) -> Delivery:
        return await self._leases.persist(lease, "weights", functools.partial(self._source.fetch, ref), FETCH_S)

    async def _from_store(self, lease: Lease, ref: WeightsRef) -> Delivery:
        return await self._leases.persist(lease, "weights", functools.partial(self._source.from_store, ref), FETCH_S)


async def _unless_gone(fetching: Awaitable[Delivery]) -> Delivery:
    try:
        return await fetching
    except RpcError as error:
        if error.code in (ErrorCode.MISSING, ErrorCode.COLLECTED):
            raise WeightsGone(str(error)) from None
        raise
