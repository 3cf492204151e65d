"""The source of an engine's weights: the store's shards, or a transfer by the trainer with the shards as a fallback.

It does not check the weights that arrive; `WeightsSync` proves them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import structlog

from proto.messages import ErrorCode, TransferOffer, WeightsRef
from proto.tensors import Array
from services.rollout.engine import Engine
from services.rollout.weights.transfer import EngineTransfers, HostMemory, Receiver, TransferFailed
from shared.batch import fetch_weights
from shared.dataplane.client import DataClient
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.rpc.errors import RpcError
from shared.weights.drill import noise_factors, perturb
from shared.weights.weight_set import WeightSet

SHARDS = "shards"
FETCH_S = 120.0
"""Maximum seconds without data from a store. After that, the data that has arrived is discarded and the store is asked
again."""
Emit = Callable[[str, dict[str, float | str]], None]
VersionKey = tuple[int, int, int]
"""Lineage, step and fence."""


class LoadEntry(StrEnum):
    """The ways in which weights enter an engine. Each is drilled separately."""

    SET = "set_weights"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights that were set in an engine, the route by which they arrived, and how they entered the engine.

    `given` holds the arrays that were set, and is empty if the engine received the weights itself.
    """

    route: str
    entry: LoadEntry
    weights: WeightSet
    given: Mapping[str, Array] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of tensors."""
        return len(self.weights.parameters)


@runtime_checkable
class Delivery(Protocol):
    """Weights that have arrived or are about to arrive."""

    @property
    def entry(self) -> LoadEntry:
        """How the weights will enter the engine."""

    async def begin(self) -> None:
        """Do what can be done while the engine continues to sample; `load` or `decline` follows. Raises
        TransferFailed."""

    async def load(self, engine: Engine) -> LoadedWeights:
        """Set the weights.

        Raises WeightsMismatch or RpcError. If the weights do not arrive, raises TransferFailed and leaves the engine
        unchanged.
        """

    def decline(self) -> None:
        """Drop the weights, which will not be loaded."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Arrays:
    """Weights in memory, by parameter name."""

    weights: Mapping[str, Array]
    route: str = SHARDS
    entry: ClassVar[LoadEntry] = LoadEntry.SET

    async def begin(self) -> None:
        """Do nothing, since the weights have arrived."""

    def decline(self) -> None:
        """Do nothing, since no sender is waiting."""

    async def load(self, engine: Engine) -> LoadedWeights:
        await engine.set_weights(self.weights)
        return LoadedWeights(self.route, self.entry, WeightSet.of(self.weights), self.weights)


async def own_drill(engine: Engine, ref: WeightsRef) -> Delivery:
    """Return the engine's own base weights, perturbed as the trainer perturbs them for the drill."""
    perturbed: dict[str, Array] = {}
    base = await engine.base_weights()
    try:
        factors = noise_factors(base, ref.drill_factors)
    except ValueError as error:
        raise RpcError(ErrorCode.CONFLICT, f"weights {ref.task_id}: {error}") from None
    for name, values in base.items():
        # Perturb one parameter at a time, because perturbing a large model as a whole takes longer than a lease or a
        # heartbeat may wait.
        perturbed[name] = await engine.compute(partial(perturb, name, values, ref.drill_seed, factors[name]))
    return Arrays(perturbed)


class _Fetching:
    """The callers that are waiting for one version. The progress of the fetch is reported to all of them."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting: list[OnProgress] = []

    def on_progress(self) -> None:
        for on_progress in list(self.waiting):
            on_progress()


class WeightsSource:
    """The weights of an engine: from the store, or from the trainer with the store as a fallback.

    Tasks that want a version at the same time share one delivery: the lease being prefetched, the leases waiting for
    their turn and an in-flight swap. A version is kept only while it is in use, because the store cannot free its bytes
    until it is released. The source is used only on the service's loop.
    """

    def __init__(
        self,
        data: DataClient,
        store: str = "",
        *,
        transfers: EngineTransfers | None = None,
        route: str = SHARDS,
        emit: Emit,
        engine: Receiver[TransferOffer] | None = None,
    ) -> None:
        """`store` is this host's store, which fetches versions from other hosts. If it is empty, versions are read from
        the store that holds them. `emit(topic, values)` sends telemetry.

        `transfers` brings versions from the trainer by `route`; None: the store is used. `engine` receives into its own
        memory. If it is None, this process receives while the engine keeps working.
        """
        self._data = data
        self._store = store
        self._transfers = transfers
        self._route = route
        self._emit = emit
        self._engine = engine
        self._memory = HostMemory()
        self._deliveries: WeakValueDictionary[VersionKey, Delivery] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[VersionKey, _Fetching] = WeakValueDictionary()
        self._log = structlog.get_logger("transfer")

    async def fetch(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Delivery:
        """Return the weights of `ref`. Raises RpcError if they are not available, or if nothing arrives for
        `FETCH_S`."""
        key = (ref.lineage, ref.step, ref.fence)
        fetching = self._fetching.setdefault(key, _Fetching())
        fetching.waiting.append(on_progress)
        try:
            async with fetching.lock:  # if the fetch fails, the next caller repeats it with its own full time limit
                on_progress()
                delivery = self._deliveries.get(key)
                if delivery is None:
                    delivery = self._deliveries[key] = await self._deliver(ref, fetching.on_progress)
                return delivery
        finally:
            fetching.waiting.remove(on_progress)

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Delivery:
        """Return the weights of `ref` from the store, for example after a failed transfer."""
        return Arrays(await fetch_weights(self._data, ref, self._store, deadline_s=FETCH_S, on_progress=on_progress))

    async def drill(self, engine: Engine, ref: WeightsRef, entry: LoadEntry) -> Delivery:
        """Return the weights of the start-up drill, to be brought into the engine through `entry`."""
        if self._transfers is None or (self._engine is not None and entry == LoadEntry.SET):
            return await own_drill(engine, ref)
        if self._engine is not None:
            return _IntoEngine(self, self._transfers, self._engine, ref, is_drill=True)
        try:
            return Arrays(await self._transfers.bring(ref, self._memory, drill=True), self._route)
        except TransferFailed as error:
            self.failed(ref, error)
            return await own_drill(engine, ref)

    def close(self) -> None:
        """Leave the communicator."""
        self._memory.leave()

    async def _deliver(self, ref: WeightsRef, on_progress: OnProgress) -> Delivery:
        if self._transfers is None:
            return await self.from_store(ref, on_progress)
        if self._engine is not None:
            return _IntoEngine(self, self._transfers, self._engine, ref, is_drill=False)
        try:
            began = time.perf_counter()
            weights = await self._transfers.bring(ref, self._memory, drill=False)
        except TransferFailed as error:
            self.failed(ref, error)
            on_progress()
            return await self.from_store(ref, on_progress)
        self.arrived(ref, sum(array.nbytes for array in weights.values()), time.perf_counter() - began)
        return Arrays(weights, self._route)

    def arrived(self, ref: WeightsRef, nbytes: int, seconds: float) -> str:
        """Report that a version has arrived, and return its route."""
        values: dict[str, float | str] = {"step": ref.step, "route": self._route, "bytes": nbytes, "seconds": seconds}
        self._emit("weights/transfer", values)
        return self._route

    def failed(self, ref: WeightsRef, error: TransferFailed) -> None:
        """Report that a transfer failed and that the shards are used instead."""
        self._log.warning("transfer failed, the shards are used", step=ref.step, route=self._route, why=str(error))
        self._emit("weights/transfer", {"step": ref.step, "route": SHARDS, "why": str(error)[:200]})


@dataclass(slots=True, weakref_slot=True)
class _IntoEngine:
    """Weights that the engine itself will receive between two steps."""

    source: WeightsSource
    transfers: EngineTransfers
    receiver: Receiver[TransferOffer]
    ref: WeightsRef
    is_drill: bool
    _asked: asyncio.Task[TransferOffer] | None = None
    entry: ClassVar[LoadEntry] = LoadEntry.RECEIVE

    async def begin(self) -> None:
        """Ask the trainer to read the version and to prepare to send it, so that generation does not wait for that."""
        if self._asked is None:
            self._asked = asyncio.create_task(self.transfers.ask(self.ref, self.receiver))
        try:
            await asyncio.shield(self._asked)  # a concurrent `load` waits for this task, too
        except TransferFailed as error:
            self._asked = None
            self.source.failed(self.ref, error)
            raise

    def decline(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            self.transfers.decline(asked.result(), self.receiver)

    async def load(self, engine: Engine) -> LoadedWeights:
        began = time.perf_counter()
        asked, self._asked = self._asked, None
        try:
            if asked is None:
                offer = await self.transfers.bring(self.ref, self.receiver, drill=self.is_drill)
            else:
                offer = await self.transfers.take(await asyncio.shield(asked), self.receiver)
        except TransferFailed as error:
            self.source.failed(self.ref, error)
            if not self.is_drill:
                raise
            return await (await own_drill(engine, self.ref)).load(engine)
        weights = WeightSet(offer.parameters)
        route = self.source.arrived(self.ref, weights.nbytes, time.perf_counter() - began)
        return LoadedWeights(route, self.entry, weights)
