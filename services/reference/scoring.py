"""Scores a block on all ranks that share the model: rank 0 holds the lease, and the others follow.

All ranks meet before they enter a collective. If a rank cannot get ready, it says so when they meet, and the lease is
handed back. If a rank dies, the whole group ends: all ranks exit, are restarted and meet again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from proto.messages import Ack, ErrorCode, ScoreTogether, WeightsRef
from proto.tensors import Array
from services.reference.scorer import BEGINNING, FrozenScorer
from shared.actor.service import Service
from shared.batch import fetch_weights
from shared.colocation.devices import PARTS_OF
from shared.colocation.turns import Turns
from shared.dataplane.client import DataClient
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.lease import Lease, LeaseBook, LeaseLost
from shared.ranks.group import Group, GroupEnded
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.stages import stage_named
from shared.topology.models import FrozenModel

T = TypeVar("T")
Weights = Mapping[str, Array]
Asked = asyncio.Queue[tuple[ScoreTogether, Call]]
Fetch = Callable[[OnProgress], Coroutine[Any, Any, dict[str, Array]]]

TOGETHER_S = 3600.0
"""Maximum seconds that a block may take, including the turns of other processes on shared devices."""
DATA_CALL_S = 30.0
WEIGHTS_CALL_S = 300.0


class Scoring:
    """One rank's part in scoring, on the service's loop. If the model has a single rank, there is no other rank to wait
    for."""

    def __init__(
        self,
        service: Service,
        model: FrozenModel,
        scorer: FrozenScorer,
        data: DataClient,
        turns: Turns,
        group: Group,
        others: Sequence[Client],
        store: str,
    ) -> None:
        """`turns` manages the process's turns on the scorer's devices. `others` are clients of the other ranks, used by
        rank 0. `store` is this host's store.
        """
        self.turns = turns
        self._service = service
        self._parts = PARTS_OF[model.service]
        self._needs = stage_named(model.stage).needs
        self._scorer = scorer
        self._data = data
        self._group = group
        self._others = others
        self._store = store
        self._number = 0

    # ---- rank 0

    async def lead(
        self, lease: Lease, leases: LeaseBook, shards: Sequence[dict[str, Array]]
    ) -> tuple[list[tuple[Array, ...]], float]:
        """Return the arrays of each task in the lease (`FrozenScorer.score`), and how long scoring took, in seconds.

        Raises LeaseLost or GroupEnded. Raises RpcError(conflict) if the trainer and the reference disagree on the
        version.
        """
        self._number += 1
        ref = lease.grant.weights
        request = ScoreTogether(
            generation=self._group.generation, number=self._number, batch=lease.grant.batch, weights=ref
        )
        following = [asyncio.ensure_future(client.call(request, Ack, deadline_s=TOGETHER_S)) for client in self._others]
        try:
            weights = await self._ready(
                request, self._weights(ref, lambda get: leases.persist(lease, "weights", get, WEIGHTS_CALL_S)), lease
            )
            await self._acquire_devices()
            if not self._others:  # if there are other ranks, this one can no longer withdraw
                lease.check()
            return await self._group.together(_name(request), self._compute(ref, weights, shards, lease.cancel))
        except GroupEnded:
            raise
        except RpcError as error:
            if error.code == ErrorCode.CONFLICT or (not self._others and error.code != ErrorCode.BAD_DATA):
                raise
            await leases.hand_back(lease, f"not scored: {error}", untouched=error.code == ErrorCode.BAD_DATA)
            who = "another rank" if self._others else "the server"
            raise LeaseLost(f"{who} could not score the block: {error}") from None
        finally:
            for call in following:
                call.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    # ---- other ranks

    async def follow(self, asked: Asked) -> None:
        """Take part in everything that rank 0 scores, until cancelled. Raises GroupEnded."""
        while True:
            request, call = await asked.get()
            try:
                if request.generation != self._group.generation:
                    raise RpcError(
                        ErrorCode.LOST, f"group {request.generation:x} has ended and was replaced by another"
                    )
                await self._follow(request)
            except RpcError as error:
                call.fail(error)
                if isinstance(error, GroupEnded):
                    raise
            else:
                call.reply(Ack())
            finally:
                self.turns.done()

    async def _follow(self, request: ScoreTogether) -> None:
        ref = request.weights

        async def prepare() -> tuple[Sequence[dict[str, Array]], Weights | None]:
            shards = await self._data.fetch(request.batch, self._needs, deadline_s=DATA_CALL_S)
            return shards, await self._weights(ref, lambda get: get(ignore_progress))

        shards, weights = await self._ready(request, prepare())
        await self._acquire_devices()
        nobody_asks = threading.Event()  # never set, because rank 0 holds the lease
        await self._group.together(_name(request), self._compute(ref, weights, shards, nobody_asks))

    # ---- every rank

    async def _ready(self, request: ScoreTogether, preparation: Awaitable[T], lease: Lease | None = None) -> T:
        """Return the result of `preparation` once every rank is ready. Raises RpcError if another rank failed.

        The `lease` is renewed in the meantime, because the other ranks also need time to fetch their data.
        """
        try:
            prepared = await preparation
        except (RpcError, LeaseLost) as error:
            await self._group.meet(_name(request), str(error) or type(error).__name__)
            raise
        meeting = self._group.meet(_name(request))
        await (meeting if lease is None else lease.within(self._group.deadline_s, meeting))
        return prepared

    async def _acquire_devices(self) -> None:
        await self.turns.acquire(self._parts)
        await self._scorer.come_back()

    async def _weights(
        self, ref: WeightsRef | None, attempt: Callable[[Fetch], Awaitable[dict[str, Array]]]
    ) -> Weights | None:
        """Fetch the weights of version `ref`, or return None if the scorer already holds that version."""
        if ref is None or self._scorer.version == _wanted(ref):
            return None
        return await attempt(
            lambda on_progress: fetch_weights(
                self._data, ref, self._store, deadline_s=WEIGHTS_CALL_S, on_progress=on_progress
            )
        )

    async def _compute(
        self,
        ref: WeightsRef | None,
        weights: Weights | None,
        shards: Sequence[dict[str, Array]],
        cancel: threading.Event,
    ) -> tuple[list[tuple[Array, ...]], float]:
        """Load version `ref` if necessary, verify it with the canary, then score."""
        if self._scorer.version != _wanted(ref):
            error = await self._scorer.init_model(ref, weights)
            if ref is not None:
                self._service.log.info("reference refreshed", lineage=ref.lineage, step=ref.step, canary_error=error)
                self._service.telemetry.emit(
                    "weights", {"lineage": ref.lineage, "step": ref.step, "canary_error": error}
                )
        began = time.perf_counter()
        arrays = await self._scorer.score(shards, cancel)
        return arrays, time.perf_counter() - began


def _wanted(ref: WeightsRef | None) -> tuple[int, int]:
    return (ref.lineage, ref.step) if ref is not None else BEGINNING


def _name(request: ScoreTogether) -> str:
    return f"score {request.number}"
