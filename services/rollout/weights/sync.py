"""Loads policy versions into the engine and proves that they are there.

The engine never samples with weights whose loading has not been verified, or that have not matched the trainer's
canary.

The start-up drill precedes the first version: a perturbed copy of the engine's own base weights takes the same route
into the engine and must match the trainer's canary of that copy. This check finds parameters that an update never
reaches. A failed engine does not recover on its own: there is no edge DEAD -> HEALTHY, only a new start with a new
drill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import structlog

from proto.messages import Canary, ErrorCode, WeightsRef
from proto.tensors import Array
from services.rollout.engine import Engine, WeightsMismatch
from services.rollout.weights.source import SHARDS, Arrays, Delivery, LoadedWeights, LoadEntry, WeightsSource, own_drill
from services.rollout.weights.transfer import TransferFailed
from shared.rpc.errors import RpcError
from shared.weights.drill import canary_error

CALIBRATION = 4.0
"""Ratio of the tolerance to the larger of two canary errors on verified weights: the drill's and the first
version's."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version that an engine holds, ordered by lineage, then step. (0, -1) means none yet."""

    lineage: int = 0
    step: int = -1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A finished sync. `canary_error` is the largest absolute difference between log-probs; `verify_s` is the part of
    `seconds` spent on verifying the weights."""

    step: int
    lineage: int
    parameters: int
    nbytes: int
    seconds: float
    verify_s: float
    canary_error: float
    tolerance: float
    route: str = SHARDS

    def scalars(self, samples: int) -> dict[str, Array]:
        """Return a completion's columns that describe its samples' weights, each float32 [samples].

        Bytes are exact to 24 bits; `sync_sent` is 1 for weights that the trainer sent and 0 for shards.
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
    """A version on its way into the engine. `started` is a reading of the performance counter."""

    ref: WeightsRef
    delivery: Delivery
    started: float
    loaded: LoadedWeights | None = None
    """The weights that were set, or None if they are not in the engine."""


class WeightsSync:
    """The only way to set the engine's weights. There is one instance per engine, and calls never overlap."""

    def __init__(
        self,
        engine: Engine,
        who: str,
        emit: Callable[[str, dict[str, float | str]], None],
        source: WeightsSource | None = None,
    ) -> None:
        """`who` is the service's name in errors; `emit(topic, values)` receives the reports; `source` provides the
        drill's weights (default: the engine's own)."""
        self._engine = engine
        self._who = who
        self._emit = emit
        self._source = source
        self._drilled: set[LoadEntry] = set()
        """The entries that were proved to reach every parameter."""
        self._noise = 0.0
        """Largest canary error of the drills, whose weights were verified."""
        self._calibrated: float | None = None
        self._base = ""
        """Name of the weights under the adapter that the engine was proved to hold."""
        self._coming: _Coming | None = None
        self.holds = HeldVersion()
        self.last: SyncReport | None = None
        """Report of the sync that brought the newest weights."""

    def needs(self, ref: WeightsRef, *, exact: bool) -> bool:
        """Return whether the engine must load `ref` first: it holds an older version or, if `exact`, any other one."""
        wanted = (ref.lineage, ref.step)
        version = (self.holds.lineage, self.holds.step)
        return version != wanted if exact else version < wanted

    def is_drilled(self, entry: LoadEntry) -> bool:
        """Return whether this entry has been proved to reach every parameter."""
        return entry in self._drilled

    def stays(self, held: HeldVersion) -> None:
        """Record that the expected version did not arrive and that the engine still holds `held`."""
        self.holds, self._coming = held, None

    def forget(self) -> None:
        """Record that the engine is asleep and has lost its weights."""
        self.holds, self._base = HeldVersion(), ""
        if self._coming is not None:
            self._coming.loaded = None

    async def load(self, ref: WeightsRef, weights: Mapping[str, Array] | Delivery) -> SyncReport:
        """Run `place` and then `prove`."""
        await self.place(ref, weights)
        return await self.prove()

    async def place(self, ref: WeightsRef, weights: Mapping[str, Array] | Delivery) -> None:
        """Set `weights` (by parameter name, or as a delivery). The engine holds no version until `prove` succeeds.

        Raises RpcError(conflict) if the weights do not fit, after which the engine must not continue. Raises
        TransferFailed if they do not arrive, which leaves the engine unchanged.
        """
        if ref.kind not in self._engine.loads:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: version {ref.step} of lineage {ref.lineage} is of kind {ref.kind} over "
                f"{ref.base or 'no base'}; this engine loads only {', '.join(sorted(self._engine.loads))}: use an "
                "engine that loads this kind (services.rollout.engine)",
            )
        self.holds = HeldVersion()  # the engine holds neither the old version nor the new one until `prove` succeeds
        delivery = weights if isinstance(weights, Delivery) else Arrays(weights)
        self._coming = _Coming(ref, delivery, time.perf_counter())
        if delivery.entry in self._drilled:
            await self._set(self._coming)

    async def prove(self) -> SyncReport:
        """Run the drill if it has not been passed yet, then check the canary of what was placed.

        Raises RpcError(conflict) if the engine and the trainer disagree, after which the engine must not continue.
        Raises TransferFailed if the weights for the drill, or those after it, did not arrive.
        """
        coming, self._coming = self._coming, None
        if coming is None:
            raise RpcError(ErrorCode.INTERNAL, f"{self._who}: no weights were loaded that could be verified")
        await self._prove_base(coming.ref)
        ref, loaded = coming.ref, await self._drilled_and_set(coming)
        what = f"version {ref.step} of lineage {ref.lineage}"
        verify_s = await self._verify(ref.canary, loaded, what)
        error = await self._prove(ref.canary, self._tolerance(ref.canary), loaded.parameters, what)
        if ref.canary.floor and self._calibrated is None:
            self._calibrated = self._calibrate(ref.canary, max(self._noise, error))
        self.holds = HeldVersion(ref.lineage, ref.step)
        report = self.last = SyncReport(
            step=ref.step,
            lineage=ref.lineage,
            parameters=loaded.parameters,
            nbytes=loaded.weights.nbytes,
            seconds=time.perf_counter() - coming.started,
            verify_s=verify_s,
            canary_error=error,
            tolerance=self._tolerance(ref.canary),
            route=loaded.route,
        )
        values = asdict(report)
        self._emit("weights", {"bytes": values.pop("nbytes"), **values})
        return report

    async def _prove_base(self, ref: WeightsRef) -> None:
        """Check the weights under an adapter, once for every base. Raises RpcError(conflict)."""
        if ref.base == self._base:
            return
        try:
            await self._engine.prove_base(ref.base_digests)
        except WeightsMismatch as mismatch:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: the engine does not hold the weights under the adapter, {ref.base}: {mismatch}; give "
                "trainer and engine the same files of policy.model; the engine must not sample",
            ) from None
        self._base = ref.base

    async def _drilled_and_set(self, coming: _Coming) -> LoadedWeights:
        """Return the weights that are now in the engine. The entry that they used has been drilled.

        Raises TransferFailed if the drill had to use another entry, because the weights would most likely need that
        entry as well.
        """
        entry = coming.delivery.entry
        if entry not in self._drilled:
            await self._drill(coming.ref, entry)
            if entry not in self._drilled:
                raise TransferFailed(f"the start-up drill did not arrive through {entry}")
        return coming.loaded or await self._set(coming)

    async def _set(self, coming: _Coming) -> LoadedWeights:
        try:
            coming.loaded = await coming.delivery.load(self._engine)
        except WeightsMismatch as mismatch:
            raise RpcError(ErrorCode.CONFLICT, f"{self._who}: weights {coming.ref.task_id}: {mismatch}") from None
        return coming.loaded

    async def _drill(self, ref: WeightsRef, entry: LoadEntry) -> None:
        source = self._source
        drill = own_drill(self._engine, ref) if source is None else source.drill(self._engine, ref, entry)
        loaded = await self._set(_Coming(ref, await drill, 0.0))
        what = f"the start-up drill (seed {ref.drill_seed}, by {loaded.route})"
        verify_s = await self._verify(ref.drill, loaded, what)
        error = await self._prove(ref.drill, ref.drill.tolerance, loaded.parameters, what)
        self._noise, self._calibrated = max(self._noise, error), None
        values: dict[str, float | str] = {"parameters": loaded.parameters, "route": loaded.route}
        values |= {"verify_s": verify_s, "canary_error": error, "tolerance": ref.drill.tolerance}
        self._emit("drill", values)
        self._drilled.add(loaded.entry)

    async def _verify(self, canary: Canary, loaded: LoadedWeights, what: str) -> float:
        """Check every bit of every parameter and return how long this took, in seconds. Raises RpcError(conflict)."""
        began = time.perf_counter()
        announced = replace(loaded.weights, digests=canary.digests).digest_of
        try:
            if canary.digests and len(canary.digests) != loaded.parameters:
                raise WeightsMismatch(f"{len(canary.digests)} digests announced for {loaded.parameters} parameters")
            if not announced and not loaded.given:
                raise WeightsMismatch(f"the trainer sent them by {loaded.route} and announced no digests")
            await self._engine.verify(loaded.given, announced)
        except WeightsMismatch as mismatch:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: the engine does not hold {what}: {mismatch}; the engine must not sample",
            ) from None
        return time.perf_counter() - began

    async def _prove(self, canary: Canary, tolerance: float, parameters: int, what: str) -> float:
        """Check that the engine, on verified weights, computes the trainer's log-probs. Raises RpcError(conflict)."""
        scores = await self._engine.score(canary.token_ids)
        if scores.shape != canary.logprobs.shape:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: canary of {what}: {list(canary.logprobs.shape)} log-probs for "
                f"{len(canary.token_ids)} tokens, but there must be one fewer; the trainer and the engine run "
                "different releases",
            )
        error = canary_error(canary.logprobs, scores, canary.quantile)
        if not error <= tolerance:  # also rejects NaN
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: canary mismatch after {what}: error {error:.3g} exceeds the tolerance {tolerance:.3g} "
                f"with {parameters} parameters set; the engine holds these weights but does not compute the "
                "trainer's log-probs; the engine must not sample",
            )
        return error

    def _tolerance(self, canary: Canary) -> float:
        return canary.tolerance if self._calibrated is None else min(self._calibrated, canary.tolerance)

    def _calibrate(self, canary: Canary, noise: float) -> float:
        """Return the tolerance for an engine whose error was `noise` on verified weights, both perturbed and true ones.

        Raises RpcError(conflict) if that tolerance would accept an engine that loaded none of the drill's weights.
        """
        tolerance = max(CALIBRATION * noise, canary.floor)
        values: dict[str, float | str] = {"tolerance": tolerance, "noise": noise, "limit": canary.tolerance}
        self._emit("calibration", values)
        structlog.get_logger("weights").info("canary calibrated", **values)
        if not tolerance <= canary.tolerance:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"{self._who}: the canary cannot be calibrated: engine and trainer differ by {noise:.3g} on the same "
                f"weights, which requires a tolerance of {tolerance:.3g}, but the drill allows only "
                f"{canary.tolerance:.3g}; they compute different models, or policy.dtype is too coarse for this one: "
                "use float32",
            )
        return tolerance
