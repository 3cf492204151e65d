"""Brings a policy version into the engine and proves that it is there. Must never let an engine sample with weights
that have not matched the trainer's canary.

Before the first version of each route the start-up drill: a perturbed copy of the engine's own base weights goes
through the same route and `set_weights` and must match the trainer's canary of that copy, which finds parameters that
an update never reaches.
A failed engine does not come back by itself: DEAD -> HEALTHY is not an edge, only a new start with a new drill is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from proto.messages import Canary, ErrorCode, WeightsRef
from proto.tensors import Array
from services.rollout.engine import Engine, WeightsMismatch
from services.rollout.weights_source import SHARDS
from shared.drill import perturb
from shared.rpc.errors import RpcError


@dataclass(frozen=True, slots=True)
class Version:
    """What an engine holds. Ordered by lineage, then step; (0, -1) is nothing yet."""

    lineage: int = 0
    step: int = -1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One finished sync: `canary_error` is the largest absolute difference of a log-prob."""

    step: int
    lineage: int
    parameters: int
    nbytes: int
    seconds: float
    canary_error: float
    tolerance: float
    route: str = SHARDS

    def scalars(self, samples: int) -> dict[str, Array]:
        """What a completion says of the weights its samples were made with: float32 [samples] each.

        Bytes are exact to 24 bits; `sync_sent` is 1 for weights that the trainer sent, 0 for shards.
        """
        values = {
            "sync_error": self.canary_error,
            "sync_seconds": self.seconds,
            "sync_bytes": self.nbytes,
            "sync_sent": float(self.route != SHARDS),
        }
        return {name: np.full(samples, value, np.float32) for name, value in values.items()}


@dataclass
class _Coming:
    """A version on its way into the engine; `started` by the performance counter."""

    ref: WeightsRef
    weights: Mapping[str, Array]
    route: str
    started: float
    is_set: bool = False


class WeightsSync:
    """The only way into the engine's weights. One an engine; calls never overlap."""

    def __init__(
        self,
        engine: Engine,
        who: str,
        emit: Callable[[str, dict[str, float | str]], None],
        drills: Callable[[WeightsRef, str], Awaitable[Mapping[str, Array] | None]] | None = None,
    ) -> None:
        """`who`: the service's name for errors; `emit(topic, values)`: where reports go; `drills(ref, route)`: the
        drill's weights by a route (`WeightsSource.drill`), by default what the engine makes of its own."""
        self._engine = engine
        self._who = who
        self._emit = emit
        self._drills = drills
        self._drilled: set[str] = set()
        """Routes that were proved to reach every parameter."""
        self._coming: _Coming | None = None
        self.holds = Version()
        self.last: SyncReport | None = None
        """Of the sync that brought the newest weights."""

    def needs(self, ref: WeightsRef, *, exact: bool) -> bool:
        """Whether the engine must load `ref` first: it holds an older version, or, if `exact`, any other."""
        wanted = (ref.lineage, ref.step)
        held = (self.holds.lineage, self.holds.step)
        return held != wanted if exact else held < wanted

    def forget(self) -> None:
        """The engine sleeps: its weights are lost."""
        self.holds = Version()
        if self._coming is not None:
            self._coming.is_set = False

    async def load(self, ref: WeightsRef, weights: Mapping[str, Array], route: str = SHARDS) -> SyncReport:
        """`place` and `prove`."""
        await self.place(ref, weights, route)
        return await self.prove()

    async def place(self, ref: WeightsRef, weights: Mapping[str, Array], route: str = SHARDS) -> None:
        """Set `weights` (by parameter name), which came by `route`. The engine holds no version until `prove`.

        Raises RpcError(conflict) when they do not fit: the engine must not go on.
        """
        self.holds = Version()  # neither the old version nor the new one until it is proved
        self._coming = _Coming(ref, weights, route, time.perf_counter())
        if route in self._drilled:
            await self._set(self._coming)

    async def prove(self) -> SyncReport:
        """Check the canary of what was placed, after the drill if it was not passed yet.

        Raises RpcError(conflict) when the engine and the trainer disagree: the engine must not go on.
        """
        coming, self._coming = self._coming, None
        if coming is None:
            raise RpcError(ErrorCode.INTERNAL, f"{self._who}: no weights were placed that could be proved")
        ref, weights = coming.ref, coming.weights
        if coming.route not in self._drilled:
            await self._drill(ref, coming.route)
        if not coming.is_set:
            await self._set(coming)
        error = await self._prove(ref.canary, len(weights), f"version {ref.step} of lineage {ref.lineage}")
        self.holds = Version(ref.lineage, ref.step)
        report = self.last = SyncReport(
            step=ref.step,
            lineage=ref.lineage,
            parameters=len(weights),
            nbytes=sum(value.nbytes for value in weights.values()),
            seconds=time.perf_counter() - coming.started,
            canary_error=error,
            tolerance=ref.canary.tolerance,
            route=coming.route,
        )
        self._emit(
            "weights",
            {
                "step": report.step,
                "lineage": report.lineage,
                "parameters": report.parameters,
                "bytes": report.nbytes,
                "seconds": report.seconds,
                "canary_error": report.canary_error,
                "tolerance": report.tolerance,
                "route": report.route,
            },
        )
        return report

    async def _set(self, coming: _Coming) -> None:
        try:
            await self._engine.set_weights(coming.weights)
        except WeightsMismatch as mismatch:
            raise RpcError(ErrorCode.CONFLICT, f"{self._who}: weights {coming.ref.task_id}: {mismatch}") from None
        coming.is_set = True

    async def _drill(self, ref: WeightsRef, route: str) -> None:
        perturbed = await self._drills(ref, route) if self._drills is not None else None
        if perturbed is None:
            base = await self._engine.base_weights()
            perturbed = {name: perturb(name, values, ref.drill_seed) for name, values in base.items()}
        await self._set(_Coming(ref, perturbed, route, 0.0))
        error = await self._prove(ref.drill, len(perturbed), f"the start-up drill (seed {ref.drill_seed}, {route})")
        values: dict[str, float | str] = {"parameters": len(perturbed), "route": route}
        self._emit("drill", {**values, "canary_error": error, "tolerance": ref.drill.tolerance})
        self._drilled.add(route)

    async def _prove(self, canary: Canary, parameters: int, what: str) -> float:
        scores = await self._engine.score(canary.token_ids)
        if scores.shape != canary.logprobs.shape:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: canary of {what}: {list(canary.logprobs.shape)} log-probs for "
                f"{len(canary.token_ids)} tokens, must be one less; trainer and engine are of different releases",
            )
        error = float(np.abs(scores - canary.logprobs).max())
        if not error <= canary.tolerance:  # a NaN is no match either
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: canary mismatch after {what}: error {error:.3g} over the tolerance "
                f"{canary.tolerance:.3g} with {parameters} parameters set; the update does not reach all of the "
                "engine's weights, it must not sample",
            )
        return error
