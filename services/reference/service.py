"""The reference actor: leases rolled-out tasks, scores their tokens with the frozen model, puts `ref_logprobs`.
Must never score at another temperature than the tokens were sampled at, nor with another version than the lease names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from proto.messages import ErrorCode, Heartbeat, Outcome, TaskHandle, TaskResult
from proto.tensors import Array
from services.reference.kl_sums import NEEDS, kl_sums
from shared.actor.own_store import own_store
from shared.actor.service import Service
from shared.batch import weights_meta
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.devices import REFERENCE as WEIGHTS
from shared.devices import Parts
from shared.lease import Lease, LeaseBook, LeaseLost
from shared.pipeline import LeasePipeline
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.stages import REFERENCE, REFERENCE_SCALAR
from shared.turns import OwnDevices, Turns, take_turns

if TYPE_CHECKING:
    from services.reference.scorer import Scorer

MAX_BLOCK_TASKS = 64
DATA_CALL_S = 30.0
WEIGHTS_CALL_S = 300.0
BEGINNING = (0, 0)
"""Version of the model directory."""
_MAKES = REFERENCE.makes[0]
_WEIGHTS: Parts = frozenset({WEIGHTS})
Shards = list[dict[str, Array]]


class ReferenceService(Service):
    """One copy of the frozen model; which version that is, each lease says, so that a new life needs no memory."""

    NAME: ClassVar[str] = "reference"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._data = DataClient(self.client)
        self._scorer: Scorer | None = None
        self._worker: ReferenceWorker | None = None

    async def start(self) -> None:
        # Imports take seconds: off the loop, so that the mailbox answers meanwhile.
        scorer, settings = await asyncio.to_thread(_make, self.run, self.name)
        self._data.streams.plain = settings.plain
        self._scorer = scorer
        self.progress = lambda: scorer.progress

        async def leave(parts: Parts) -> Parts:
            await scorer.leave()
            return parts

        turns: Turns = take_turns(self, leave) if settings.shared_devices else OwnDevices()
        await turns.acquire(_WEIGHTS)
        await scorer.start()
        turns.done()
        store = await own_store(self, settings.store)
        self._worker = ReferenceWorker(
            self, scorer, self._data, turns, store, settings.reward_kl, refreshed=settings.refreshed
        )

    async def serve(self) -> None:
        if self._worker is not None:
            await self._worker.pipeline.run()

    async def drain(self) -> None:
        if self._worker is not None:
            await self._worker.pipeline.drain()

    async def close(self) -> None:
        if self._scorer is not None:
            self._scorer.stop()
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._worker is None:
            return beat
        self._worker.rest()  # of a lease that was lost before its turn nobody else tells
        return msgspec.structs.replace(beat, leases=self._worker.leases.progress())

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._worker is not None:
            self._worker.leases.lost(lease_ids)


class ReferenceWorker:
    """Takes leases from mapped shards to completed ones. Belongs to the service's loop."""

    def __init__(
        self,
        service: Service,
        scorer: Scorer,
        data: DataClient,
        turns: Turns,
        store: str,
        reward_kl: str = "",
        *,
        refreshed: bool = False,
    ) -> None:
        """`turns`: on the scorer's devices; `store`: where shards go (`batch-store/0`); `reward_kl`: estimator of a KL
        in the reward, "" for none; `refreshed`: whether the version that scores changes (`algorithm.kl.refresh_every`).
        """
        self._service = service
        self._scorer = scorer
        self._data = data
        self._turns = turns
        self._scoring = False
        self._store = store
        self._reward_kl = reward_kl
        self._refreshed = refreshed
        self._needs = REFERENCE.needs + (NEEDS if reward_kl else ())
        self.leases = LeaseBook(service, REFERENCE.name, lambda: scorer.progress)
        self.leases.stands = lambda: turns.waiting
        self.pipeline: LeasePipeline[Shards, tuple[list[Array], float]] = LeasePipeline(
            self.leases,
            acquire=lambda: self.leases.acquire(MAX_BLOCK_TASKS),
            prepare=self._fetch,
            compute=self._score,
            finish=self._finish,
        )

    async def _fetch(self, lease: Lease) -> Shards:
        meta = lease.grant.batch
        try:
            return await self.leases.persist(
                lease, "fetch", lambda: self._data.fetch(meta, self._needs, deadline_s=DATA_CALL_S)
            )
        except RpcError as error:
            # Shards that are gone do not come back under this fence: say so, for the tasks to be rolled out again.
            gone = _tasks_of(error, meta.tasks) if error.code == ErrorCode.MISSING else []
            if not gone:
                raise
            reason = str(error)[:400]
            await self.leases.complete(
                lease, [TaskResult(task.task_id, task.fence, Outcome.RETRY, reason=reason) for task in gone]
            )
            raise LeaseLost(f"ended: {reason}") from None

    async def _score(self, lease: Lease, shards: Shards) -> tuple[list[Array], float]:
        self._scoring = True
        try:
            await self._turns.acquire(_WEIGHTS)
            await self._scorer.come_back()
            lease.check()
            await self._stand_at(lease)
            started = time.perf_counter()
            logprobs = await self._scorer.score(shards, lease.cancel)
            seconds = time.perf_counter() - started
            self._service.telemetry.span("score", seconds)
            return logprobs, seconds
        finally:
            self._scoring = False
            self.rest(but=lease)

    def rest(self, but: Lease | None = None) -> None:
        """Others may have the devices when no lease (`but` the one that is done) needs the model."""
        if not self._scoring and all(lease is but for lease in self.leases.uncomputed):
            self._turns.done()

    async def _stand_at(self, lease: Lease) -> None:
        """Hold the version that the lease names, and prove it. Raises RpcError(conflict) when trainer and reference
        disagree on it: then nothing may be scored.
        """
        ref = lease.grant.weights
        wanted = (ref.lineage, ref.step) if ref is not None else BEGINNING
        if self._scorer.version == wanted:
            return
        if ref is None:
            await self._scorer.init_model()
            return
        (weights,) = await self.leases.persist(
            lease, "weights", lambda: self._data.fetch(weights_meta(ref), (), deadline_s=WEIGHTS_CALL_S)
        )
        error = await self._scorer.init_model(ref, weights)
        self._service.log.info("reference refreshed", lineage=ref.lineage, step=ref.step, canary_error=error)
        self._service.telemetry.emit("weights", {"lineage": ref.lineage, "step": ref.step, "canary_error": error})

    async def _finish(self, lease: Lease, shards: Shards, computed: tuple[list[Array], float]) -> None:
        logprobs, seconds = computed
        tasks = lease.grant.batch.tasks
        puts = [
            TaskShards(task.task_id, task.fence, {_MAKES: values}) for task, values in zip(tasks, logprobs, strict=True)
        ]
        receipts = await self.leases.persist(
            lease, "put", lambda: self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S)
        )
        scalars: dict[str, Array] = {}
        if self._reward_kl:
            sums = [
                kl_sums(self._reward_kl, given, ref, task.samples)
                for task, given, ref in zip(tasks, shards, logprobs, strict=True)
            ]
            scalars["kl"] = np.concatenate(sums)
        if self._refreshed:
            step = lease.grant.weights.step if lease.grant.weights is not None else 0
            scalars[REFERENCE_SCALAR] = np.full(sum(task.samples for task in tasks), step, np.float32)
        results = [_done(*each) for each in zip(tasks, receipts, logprobs, strict=True)]
        await self.leases.complete(lease, results, scalars)
        tokens = sum(len(values) for values in logprobs)
        rate = tokens / max(seconds, 1e-9)
        self._service.telemetry.emit(
            "reference", {"tasks": len(tasks), "tokens": tokens, "seconds": seconds, "tokens_per_s": rate}
        )


def _done(task: TaskHandle, receipt: Receipt, values: Array) -> TaskResult:
    return TaskResult(
        task_id=task.task_id,
        fence=task.fence,
        outcome=Outcome.DONE,
        store=receipt.store,
        content_hash=receipt.content_hash,
        samples=task.samples,
        tokens=len(values),
        nbytes=receipt.nbytes,
    )


def _tasks_of(error: RpcError, tasks: Sequence[TaskHandle]) -> list[TaskHandle]:
    """The tasks whose shards the error names (`task_id#key`)."""
    named = {name.partition("#")[0] for name in error.names}
    return [task for task in tasks if task.task_id in named]


@dataclass(frozen=True)
class Settings:
    """What the service reads of the topology besides the scorer's numbers."""

    store: str
    reward_kl: str
    plain: bool
    """Bulk between hosts goes unencrypted."""
    shared_devices: bool
    refreshed: bool
    """The version that scores changes (`algorithm.kl.refresh_every`)."""


def _make(run: RunDir, name: str) -> tuple[Scorer, Settings]:
    from services.reference.scorer import Scorer
    from shared import topology

    try:
        loaded = topology.load(run.topology)
    except topology.TopologyError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None
    settings = loaded.services.reference
    if settings is None:
        raise RpcError(
            ErrorCode.BAD_REQUEST, "reference: the topology has no services.reference; set algorithm.kl.coef above 0"
        )
    shared = ReferenceService.NAME in loaded.colocated_services
    scorer = Scorer(
        model=Path(loaded.policy.model),
        dtype=loaded.policy.dtype,
        threads=settings.threads or 1,
        temperature=loaded.sampling.temperature,
        max_tokens=settings.max_tokens_per_micro_batch,
        deterministic=loaded.run.deterministic,
        device=settings.device,
        scratch=run.path / "offloaded" / f"{name.replace('/', '-')}.bin" if shared else None,
    )
    kl = loaded.algorithm.kl
    reward_kl = kl.estimator if kl is not None and kl.place == "reward" and kl.coef > 0 else ""
    store = service_name("batch-store", loaded.store_hosts().index(settings.host))
    refreshed = kl is not None and kl.refresh_every is not None
    return scorer, Settings(store, reward_kl, not loaded.transport.encrypt_bulk, shared, refreshed)
