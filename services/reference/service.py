"""The reference actor leases rolled-out tasks, scores their tokens with the frozen model, and puts `ref_logprobs`.

It scores at the temperature at which the tokens were sampled, with the version named in the lease.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from proto import messages
from proto.messages import Heartbeat, Outcome, TaskHandle, TaskResult
from proto.tensors import Array
from services.reference.kl_sums import NEEDS, kl_sums
from shared import topology as topologies
from shared.actor.own_store import own_store, own_store_stays
from shared.actor.service import Service
from shared.colocation.devices import REFERENCE as WEIGHTS
from shared.colocation.devices import Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.inputs import check_model
from shared.lease import Lease, LeaseBook
from shared.pipeline import LeasePipeline
from shared.ranks.group import Group, ends_with_its_peers
from shared.ranks.layout import Layout
from shared.ranks.meeting import Meeting, join
from shared.rpc.errors import BadInput
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir, service_name
from shared.stages import REFERENCE, REFERENCE_SCALAR
from shared.topology import Topology

if TYPE_CHECKING:
    from services.reference.frozen import Frozen
    from services.reference.scorer import FrozenScorer
    from services.reference.scoring import Asked, Scoring

MAX_BLOCK_TASKS = 64
DATA_CALL_S = 30.0
_MAKES = REFERENCE.makes[0]
_WEIGHTS: Parts = frozenset({WEIGHTS})
Shards = list[dict[str, Array]]


class ReferenceService(Service):
    """One rank of a copy of the frozen model. Rank 0 of each copy takes leases.

    Each lease names the version to score with, so a restarted process needs no saved state.
    """

    NAME: ClassVar[str] = "reference"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._topology = topologies.load_resolved(run.topology)
        self.telemetry.traced_share = self._topology.services.monitor.traced_share
        self._data = DataClient(self.client, reports=True, plain=not self._topology.transport.encrypt_bulk)
        settings = self._topology.services.reference
        ranks = 1 if settings is None else settings.parallel.model_ranks
        self._first = instance - instance % ranks
        """The instance that is rank 0 of this copy of the model."""
        self._group = Group(
            [service_name(self.NAME, self._first + rank) for rank in range(ranks)],
            lambda rank: self.client(self.NAME, self._first + rank),
            instance - self._first,
            self.incarnation,
            deadline_s=DATA_CALL_S if settings is None else settings.collective_s,
        )
        every = [spec.host for spec in self._topology.services_plan() if spec.service == self.NAME]
        self._hosts = every[self._first : self._first + ranks] or [None]
        self._scorer: FrozenScorer | None = None
        self._scoring: Scoring | None = None
        self._asked: Asked = asyncio.Queue()
        self._worker: ReferenceWorker | None = None
        self.mailbox.handle(messages.DrainService, self._retire)
        self.mailbox.handle(messages.Meet, self._group.on_meet)
        self.mailbox.handle(messages.ScoreTogether, self._ask)

    async def start(self) -> None:
        with ends_with_its_peers(self):
            meeting = await join(self._group, self, self._hosts)
            await self._group.until_ended(self._start(meeting))

    async def _start(self, meeting: Meeting) -> None:
        # Imports take seconds. They run off the loop, so that the mailbox can still answer in the meantime.
        scorer = await asyncio.to_thread(make_scorer, self.run, self.name, self._topology, self._group, meeting)
        self._scorer = scorer
        self.progress = lambda: scorer.progress

        async def leave(parts: Parts) -> Parts:
            await scorer.leave()
            return parts

        shared = self.NAME in self._topology.colocated_services
        turns: Turns = take_turns(self, leave) if shared else OwnDevices()
        await turns.acquire(_WEIGHTS)
        await self._group.together("load", scorer.start())
        turns.done()
        from services.reference.scoring import Scoring

        others = [self.client(self.NAME, self._first + rank) for rank in range(1, self._group.world_size)]
        leads = self._group.rank == 0
        store = await own_store(self)
        self._scoring = Scoring(self, scorer, self._data, turns, self._group, others if leads else (), store)
        if leads:
            self._worker = self._make_worker(scorer, self._scoring, store)

    def _make_worker(self, scorer: FrozenScorer, scoring: Scoring, store: str) -> ReferenceWorker:
        topology = self._topology
        self.keep(own_store_stays(self, store))
        kl = topology.algorithm.kl
        reward_kl = kl.estimator if kl is not None and kl.place == "reward" and kl.coef > 0 else ""
        refreshed = kl is not None and kl.refresh_every is not None
        return ReferenceWorker(self, scorer, self._data, scoring, store, reward_kl, refreshed=refreshed)

    def _retire(self, _: messages.DrainService, call: Call) -> messages.Ack:
        if self._worker is not None:
            self._worker.leases.retired.set()
        elif self._group.rank == 0:
            self.request_stop()  # this process has not yet leased anything
        return messages.Ack()  # the other ranks exit with rank 0

    def _ask(self, request: messages.ScoreTogether, call: Call) -> Deferred:
        self._asked.put_nowait((request, call))  # rank 0 might be ready before this rank has loaded its pieces
        return DEFERRED

    async def serve(self) -> None:
        with ends_with_its_peers(self):
            if self._worker is not None:
                await self._group.until_ended(self._worker.pipeline.run())
            elif self._scoring is not None:
                await self._group.until_ended(self._scoring.follow(self._asked))

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
        self._worker.rest()  # nothing else ends a turn whose lease is lost before it is scored
        return msgspec.structs.replace(beat, leases=self._worker.leases.progress())

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._worker is not None:
            self._worker.leases.lost(lease_ids)


class ReferenceWorker:
    """Processes leases, from fetching their shards to completing them. It is used only on the service's loop."""

    def __init__(
        self,
        service: Service,
        scorer: FrozenScorer,
        data: DataClient,
        scoring: Scoring,
        store: str,
        reward_kl: str = "",
        *,
        refreshed: bool = False,
    ) -> None:
        """`scoring` computes the log-probs. `store` is the store for the shards, such as `batch-store/0`.

        `reward_kl` is the estimator of the KL term in the reward, or "" for none. `refreshed` says whether the scoring
        version changes during the run (`algorithm.kl.refresh_every`).
        """
        self._service = service
        self._data = data
        self._scoring = scoring
        self._turns = scoring.turns
        self._computing = False
        self._store = store
        self._reward_kl = reward_kl
        self._refreshed = refreshed
        self._needs = REFERENCE.needs + (NEEDS if reward_kl else ())
        self.leases = LeaseBook(service, REFERENCE.name, lambda: scorer.progress)
        self.leases.blocked_on_devices = lambda: self._turns.waiting
        self.pipeline: LeasePipeline[Shards, tuple[list[Array], float]] = LeasePipeline(
            self.leases,
            acquire=lambda: self.leases.acquire(MAX_BLOCK_TASKS),
            prepare=self._fetch,
            compute=self._score,
            finish=self._finish,
        )

    async def _fetch(self, lease: Lease) -> Shards:
        """Return the shards of a lease. Lost shards are reported, and their tasks are then rolled out again."""
        meta = lease.grant.batch
        return await self.leases.persist(
            lease,
            "fetch",
            lambda on_progress: self._data.fetch(meta, self._needs, deadline_s=DATA_CALL_S, on_progress=on_progress),
            DATA_CALL_S,
        )

    async def _score(self, lease: Lease, shards: Shards) -> tuple[list[Array], float]:
        self._computing = True
        try:
            logprobs, seconds = await self._scoring.lead(lease, self.leases, shards)
            self._service.telemetry.span("score", seconds, self.leases.about(lease))
            return logprobs, seconds
        finally:
            self._computing = False
            self.rest(but=lease)

    def rest(self, but: Lease | None = None) -> None:
        """End the turn on the devices if no lease needs the model. `but` is not counted, because it is done."""
        if not self._computing and all(lease is but for lease in self.leases.uncomputed):
            self._turns.done()

    async def _finish(self, lease: Lease, shards: Shards, computed: tuple[list[Array], float]) -> None:
        logprobs, seconds = computed
        tasks = lease.grant.batch.tasks
        puts = [
            TaskShards(task.task_id, task.fence, {_MAKES: values}) for task, values in zip(tasks, logprobs, strict=True)
        ]
        receipts = await self.leases.persist(
            lease, "put", lambda _: self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S), DATA_CALL_S
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


def make_scorer(run: RunDir, name: str, topology: Topology, group: Group, meeting: Meeting) -> FrozenScorer:
    """Return a scorer that creates the model specified in `topology` on its compute thread. Raises
    BadInput.

    This imports torch. `group` holds the ranks that share the model; they have met, and open their process group at
    `meeting`.
    """
    from services.reference.scorer import FrozenScorer

    settings = topology.services.reference
    if settings is None:
        raise BadInput("reference: the topology has no services.reference; set algorithm.kl.coef above 0")
    check_model(run.path, "policy.model", topology.policy.model)
    model, dtype, max_tokens = Path(topology.policy.model), topology.policy.dtype, settings.max_tokens_per_micro_batch

    def whole() -> Frozen:
        from services.reference.frozen import FrozenTorch

        return FrozenTorch(model, dtype, max_tokens, settings.device, topology.policy.passes)

    def pieces() -> Frozen:
        from services.reference.frozen_megatron import FrozenMegatron  # this is an optional extra
        from shared.ranks.process_group import open_group, own_device

        parallel = settings.parallel
        place = Layout(parallel.model_ranks, parallel.tp, parallel.pp, parallel.cp).place(group.rank)
        device = own_device(settings.device, place.rank)
        if group.world_size > 1:
            open_group(meeting, place, device, deadline_s=settings.collective_s)
        return FrozenMegatron(model, dtype, max_tokens, place, device)

    shared = ReferenceService.NAME in topology.colocated_services
    return FrozenScorer(
        whole if settings.backend == "torch" else pieces,
        source=model,
        threads=settings.threads or 1,
        temperature=topology.sampling.temperature,
        deterministic=topology.run.deterministic,
        scratch=run.path / "offloaded" / f"{name.replace('/', '-')}.bin" if shared else None,
        ranks=group.world_size,
    )
