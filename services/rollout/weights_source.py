"""Where an engine's weights come from: the store's shards, or a transfer by the trainer and the shards where that
fails. Must never judge what comes; `weights_sync` proves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from proto.messages import WeightsRef
from proto.tensors import Array
from services.rollout.transfer import TransferFailed, Transfers
from shared.batch import weights_meta
from shared.dataplane.client import DataClient

SHARDS = "shards"
FETCH_S = 30.0
Emit = Callable[[str, dict[str, float | str]], None]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The weights of one version, by parameter name, and the route that they came by."""

    weights: Mapping[str, Array]
    route: str = SHARDS


class WeightsSource(Protocol):
    """What the rollout takes weights from."""

    async def fetch(self, ref: WeightsRef) -> Delivery:
        """The weights of `ref`. Raises RpcError when they are not to be had."""

    async def drill(self, ref: WeightsRef, route: str) -> Mapping[str, Array] | None:
        """What comes by `route` for the start-up drill; None: the engine perturbs its own weights."""


class ShardSource:
    """The store: mapped on this host, streamed from another."""

    def __init__(self, data: DataClient) -> None:
        self._data = data

    async def fetch(self, ref: WeightsRef) -> Delivery:
        (weights,) = await self._data.fetch(weights_meta(ref), (), deadline_s=FETCH_S)
        return Delivery(weights)

    async def drill(self, ref: WeightsRef, route: str) -> Mapping[str, Array] | None:
        return None


class TransferSource:
    """The trainer, who sends over a communicator. What it cannot send is taken from the store, and said so."""

    def __init__(self, transfers: Transfers, shards: ShardSource, *, route: str, emit: Emit) -> None:
        """`emit(topic, values)`: telemetry."""
        self._transfers = transfers
        self._shards = shards
        self._route = route
        self._emit = emit
        self._log = structlog.get_logger("transfer")

    async def fetch(self, ref: WeightsRef) -> Delivery:
        began = time.perf_counter()
        try:
            weights = await self._transfers.receive(ref, drill=False)
        except TransferFailed as error:
            self._log.warning("transfer failed, the shards are taken", step=ref.step, route=self._route, why=str(error))
            self._emit("weights/transfer", {"step": ref.step, "route": SHARDS, "why": str(error)[:200]})
            return await self._shards.fetch(ref)
        values: dict[str, float | str] = {
            "step": ref.step,
            "route": self._route,
            "bytes": sum(each.nbytes for each in weights.values()),
            "seconds": time.perf_counter() - began,
        }
        self._emit("weights/transfer", values)
        return Delivery(weights, self._route)

    async def drill(self, ref: WeightsRef, route: str) -> Mapping[str, Array] | None:
        if route == SHARDS:
            return None
        return await self._transfers.receive(ref, drill=True)
