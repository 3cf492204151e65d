"""A block's log-probs from all ranks that hold pieces of the model: one of them has the lease, the others follow. Must
never have a rank enter a collective that another one cannot join.

A rank that cannot get ready says so where they meet, and the lease goes back. One that dies ends the group: all of them
end, and meet again in their next lives.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from proto.messages import Ack, ErrorCode, ScoreTogether, WeightsRef
from proto.tensors import Array
from services.reference.scorer import BEGINNING, Scorer
from shared.actor.service import Service
from shared.batch import weights_meta
from shared.dataplane.client import DataClient
from shared.devices import REFERENCE as WEIGHTS
from shared.devices import Parts
from shared.lease import Lease, LeaseBook, LeaseLost
from shared.moved import Moved, nobody
from shared.ranks.group import Group, GroupEnded
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.stages import REFERENCE
from shared.turns import Turns

T = TypeVar("T")
Weights = Mapping[str, Array]
Asked = asyncio.Queue[tuple[ScoreTogether, Call]]
Fetch = Callable[[Moved], Coroutine[Any, Any, list[dict[str, Array]]]]

TOGETHER_S = 3600.0
"""Longest that a block may take, the others' turns on shared devices included."""
DATA_CALL_S = 30.0
WEIGHTS_CALL_S = 300.0
_PARTS: Parts = frozenset({WEIGHTS})


class Scoring:
    """Of one rank; belongs to the service's loop. A model on one rank has nobody to wait for."""

    def __init__(
        self, service: Service, scorer: Scorer, data: DataClient, turns: Turns, group: Group, others: Sequence[Client]
    ) -> None:
        """`turns`: on the scorer's devices; `others`: the mailboxes of the other ranks, for rank 0."""
        self.turns = turns
        self._service = service
        self._scorer = scorer
        self._data = data
        self._group = group
        self._others = others
        self._number = 0

    # ---- rank 0

    async def lead(
        self, lease: Lease, leases: LeaseBook, shards: Sequence[dict[str, Array]]
    ) -> tuple[list[Array], float]:
        """float32 [T] for each task of the lease, and the seconds it took once all were ready.

        Raises LeaseLost, GroupEnded, RpcError(conflict) when trainer and reference disagree on the version.
        """
        self._number += 1
        ref = lease.grant.weights
        request = ScoreTogether(
            generation=self._group.generation, number=self._number, batch=lease.grant.batch, weights=ref
        )
        following = [asyncio.ensure_future(each.call(request, Ack, deadline_s=TOGETHER_S)) for each in self._others]
        try:
            weights = await self._ready(
                request, self._weights(ref, lambda get: leases.persist(lease, "weights", get, WEIGHTS_CALL_S)), lease
            )
            await self._come()
            if not self._others:  # with others nobody may stay away any more
                lease.check()
            return await self._group.together(_name(request), self._compute(ref, weights, shards, lease.cancel))
        except GroupEnded:
            raise
        except RpcError as error:
            if not self._others or error.code == ErrorCode.CONFLICT:
                raise
            await leases.hand_back(lease, f"not scored: {error}")
            raise LeaseLost(f"another rank could not score it: {error}") from None
        finally:
            for each in following:
                each.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    # ---- the others

    async def follow(self, asked: Asked) -> None:
        """Score with rank 0 whatever it asks for, until cancelled. Raises GroupEnded."""
        while True:
            request, call = await asked.get()
            try:
                if request.generation != self._group.generation:
                    raise RpcError(ErrorCode.LOST, f"group {request.generation:x} has ended; this is another one")
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
            shards = await self._data.fetch(request.batch, REFERENCE.needs, deadline_s=DATA_CALL_S)
            return shards, await self._weights(ref, lambda get: get(nobody))

        shards, weights = await self._ready(request, prepare())
        await self._come()
        nobody_asks = threading.Event()  # the lease is rank 0's
        await self._group.together(_name(request), self._compute(ref, weights, shards, nobody_asks))

    # ---- every rank

    async def _ready(self, request: ScoreTogether, preparation: Awaitable[T], lease: Lease | None = None) -> T:
        """The result of `preparation` once every rank has its own. Raises RpcError when another rank failed.

        Others' fetches take their time, too: the `lease` waits for them.
        """
        try:
            prepared = await preparation
        except (RpcError, LeaseLost) as error:
            await self._group.meet(_name(request), str(error) or type(error).__name__)
            raise
        meeting = self._group.meet(_name(request))
        await (meeting if lease is None else lease.within(self._group.deadline_s, meeting))
        return prepared

    async def _come(self) -> None:
        await self.turns.acquire(_PARTS)
        await self._scorer.come_back()

    async def _weights(
        self, ref: WeightsRef | None, attempt: Callable[[Fetch], Awaitable[list[dict[str, Array]]]]
    ) -> Weights | None:
        """Those of version `ref` when they have to be taken."""
        if ref is None or self._scorer.version == _wanted(ref):
            return None
        (weights,) = await attempt(
            lambda moved: self._data.fetch(weights_meta(ref), (), deadline_s=WEIGHTS_CALL_S, moved=moved)
        )
        return weights

    async def _compute(
        self,
        ref: WeightsRef | None,
        weights: Weights | None,
        shards: Sequence[dict[str, Array]],
        cancel: threading.Event,
    ) -> tuple[list[Array], float]:
        """Stand at the version, and prove it; then score."""
        if self._scorer.version != _wanted(ref):
            error = await self._scorer.init_model(ref, weights)
            if ref is not None:
                self._service.log.info("reference refreshed", lineage=ref.lineage, step=ref.step, canary_error=error)
                self._service.telemetry.emit(
                    "weights", {"lineage": ref.lineage, "step": ref.step, "canary_error": error}
                )
        began = time.perf_counter()
        logprobs = await self._scorer.score(shards, cancel)
        return logprobs, time.perf_counter() - began


def _wanted(ref: WeightsRef | None) -> tuple[int, int]:
    return (ref.lineage, ref.step) if ref is not None else BEGINNING


def _name(request: ScoreTogether) -> str:
    return f"score {request.number}"
