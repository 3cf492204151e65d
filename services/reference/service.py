"""A frozen model's actor leases rolled-out tasks, scores their tokens or texts with the model, and puts the results.

It serves the reference, the teacher and the reward model. What they do differently is in the record of the model
(`FrozenModel`) and of its stage. The version with which tokens are scored is named in the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from proto import messages
from proto.messages import Heartbeat, Outcome, TaskResult, Trouble, TroubleKind, WaitKind, WaitRow
from proto.tensors import Array
from services.reference.away import Away
from shared import topology as topologies
from shared.actor.own_store import own_store, own_store_stays
from shared.actor.service import Service
from shared.colocation.devices import PARTS_OF, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.credit import KL_KEYS, kl_sums, sample_sums
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.dataplane.stream import OnProgress
from shared.inputs import check_model
from shared.lease import Lease, LeaseBook
from shared.pipeline import LeasePipeline
from shared.ranks.group import Group, ends_with_its_peers
from shared.ranks.layout import Layout
from shared.ranks.meeting import Meeting, join
from shared.rpc.errors import BadInput
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir, service_name
from shared.stages import (
    REFERENCE_SCALAR,
    REFERENCE_SCORE,
    REWARD,
    REWARD_MODEL_PART,
    stage_named,
    with_keys_of,
)
from shared.topology.model_files import without_head
from shared.topology.models import REFERENCE, REWARD_MODEL, TEACHER, FrozenModel
from shared.topology.reward import RewardRetry

if TYPE_CHECKING:
    from services.reference.frozen import Frozen
    from services.reference.scorer import FrozenScorer
    from services.reference.scoring import Asked, Scoring

MAX_BLOCK_TASKS = 64
DATA_CALL_S = 30.0
TEXT_CHARS = 900
"""Maximum length of the text of a trouble."""
Shards = list[dict[str, Array]]
Scored = tuple[list[tuple[Array, ...]], float]
"""The arrays of each task, and how long scoring took, in seconds."""


@dataclass(frozen=True)
class Started:
    """The parts of a rank whose model is loaded. Only rank 0 of a copy has a worker, which takes leases."""

    scorer: FrozenScorer
    scoring: Scoring
    worker: ReferenceWorker | None


class ReferenceService(Service):
    """One rank of a copy of the frozen model. Rank 0 of each copy takes leases.

    Each lease names the version to score with, so a restarted process needs no saved state.
    """

    NAME: ClassVar[str] = REFERENCE
    REMEDY: ClassVar[str] = "set algorithm.kl.coef above 0, or use loss dpo or ipo"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        """Raises BadInput if the run has no such model."""
        super().__init__(run, instance, supervisor)
        topology = topologies.load_resolved(run.topology)
        models = [model for model in topology.frozen if model.service == self.NAME]
        if not models:
            raise BadInput(f"{self.NAME}: the topology has no services.{self.NAME}; {self.REMEDY}")
        self._model = models[0]
        self.telemetry.traced_share = topology.monitor.traced_share
        self._data = DataClient(self.client, reports=True, plain=not topology.transport.encrypt_bulk)
        ranks = self._model.settings.parallel.model_ranks
        self._first = instance - instance % ranks
        """The instance that is rank 0 of this copy of the model."""
        self._group = Group(
            [service_name(self.NAME, self._first + rank) for rank in range(ranks)],
            lambda rank: self.client(self.NAME, self._first + rank),
            instance - self._first,
            self.incarnation,
            deadline_s=self._model.settings.collective_s,
        )
        hosts = [spec.host for spec in topology.services_plan() if spec.service == self.NAME]
        self._hosts = hosts[self._first : self._first + ranks] or [None]
        self._makes = with_keys_of(stage_named(self._model.stage), topology).makes
        self._away = Away(topology.reward.retry.limit_s)
        self._retry = topology.reward.retry
        self._asked: Asked = asyncio.Queue()
        self._started: Started | None = None
        self.mailbox.handle(messages.DrainService, self._retire)
        self.mailbox.handle(messages.Meet, self._group.on_meet)
        self.mailbox.handle(messages.ScoreTogether, self._ask)

    @property
    def _worker(self) -> ReferenceWorker | None:
        return self._started.worker if self._started is not None else None

    async def start(self) -> None:
        with ends_with_its_peers(self):
            meeting = await join(self._group, self, self._hosts)
            self._started = await self._group.until_ended(self._load(meeting))

    async def _load(self, meeting: Meeting) -> Started:
        # Imports take seconds. They run off the loop, so that the mailbox can still answer in the meantime.
        scorer = await asyncio.to_thread(
            make_scorer, self.run, self.instance, self._model, self._group, meeting, self._retry, self._away
        )
        from services.reference.scoring import Scoring

        self.progress = lambda: scorer.progress

        async def leave(parts: Parts) -> Parts:
            await scorer.leave()
            return parts

        turns: Turns = take_turns(self, leave) if self._model.shares_devices else OwnDevices()
        await turns.acquire(PARTS_OF[self.NAME])
        await self._group.together("load", scorer.start())
        turns.done()
        store = await own_store(self)
        if self._group.rank:
            return Started(scorer, Scoring(self, self._model, scorer, self._data, turns, self._group, (), store), None)
        others = [self.client(self.NAME, self._first + rank) for rank in range(1, self._group.world_size)]
        scoring = Scoring(self, self._model, scorer, self._data, turns, self._group, others, store)
        self.keep(own_store_stays(self, store))
        return Started(
            scorer, scoring, ReferenceWorker(self, self._model, self._makes, scorer, self._data, scoring, store)
        )

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
            elif self._started is not None:
                await self._group.until_ended(self._started.scoring.follow(self._asked))

    async def drain(self) -> None:
        if self._worker is not None:
            await self._worker.pipeline.drain()

    async def close(self) -> None:
        if self._started is not None:
            self._started.scorer.stop()
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._worker is None:
            return beat
        self._worker.rest()  # nothing else ends a turn whose lease is lost before it is scored
        silence, over = self._away.silence, self._away.over()
        troubles: list[Trouble] = []
        if self._model.server is not None:
            for lease in self._worker.leases.uncomputed:
                lease.untouched = silence is not None  # its tasks are not to blame for a server that is away
        if silence is not None:
            text = over or f"the teacher's server is not responding; leases wait for it: {silence.error}"
            troubles.append(Trouble(TroubleKind.JUDGE, text[:TEXT_CHARS], bool(over)))
        return msgspec.structs.replace(beat, leases=self._worker.leases.progress(), troubles=troubles)

    async def open_waits(self) -> list[WaitRow]:
        silence = self._away.silence
        if silence is None:
            return []
        text = f"the teacher's server is not responding ({silence.tries} tries): {silence.error}"
        return [WaitRow(WaitKind.OUTAGE, text, self._away.since_s(silence), self._away.limit_s)]

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._worker is not None:
            self._worker.leases.lost(lease_ids)


class TeacherService(ReferenceService):
    """The service `python -m services.reference --model teacher`."""

    NAME = TEACHER
    REMEDY = "add the section teacher"


class RewardModelService(ReferenceService):
    """The service `python -m services.reference --model reward-model`."""

    NAME = REWARD_MODEL
    REMEDY = "add the section reward_model"


class ReferenceWorker:
    """Processes leases, from fetching their shards to completing them. It is used only on the service's loop."""

    def __init__(
        self,
        service: Service,
        model: FrozenModel,
        makes: Sequence[str],
        scorer: FrozenScorer,
        data: DataClient,
        scoring: Scoring,
        store: str,
    ) -> None:
        """`makes` are the keys of the shards that the model makes. `scoring` computes them. `store` is the store for
        them, such as `batch-store/0`."""
        self._model = model
        self._makes = makes
        self._service = service
        self._data = data
        self._scoring = scoring
        self._turns = scoring.turns
        self._computing = False
        self._store = store
        stage = stage_named(model.stage)
        self._needs = stage.needs + (KL_KEYS if model.reward_kl else ("sample_index",) if model.sums else ())
        self.leases = LeaseBook(service, model.stage, lambda: scorer.progress)
        self.leases.blocked_on_devices = lambda: self._turns.waiting
        self.pipeline: LeasePipeline[Shards, Scored] = LeasePipeline(
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

    async def _score(self, lease: Lease, shards: Shards) -> Scored:
        self._computing = True
        try:
            arrays, seconds = await self._scoring.lead(lease, self.leases, shards)
            self._service.telemetry.span("score", seconds, self.leases.about(lease))
            return arrays, seconds
        finally:
            self._computing = False
            self.rest(but=lease)

    def rest(self, but: Lease | None = None) -> None:
        """End the turn on the devices if no lease needs the model. `but` is not counted, because it is done."""
        if not self._computing and all(lease is but for lease in self.leases.uncomputed):
            self._turns.done()

    async def _finish(self, lease: Lease, shards: Shards, computed: Scored) -> None:
        arrays, seconds = computed
        tasks = lease.grant.batch.tasks
        puts = [
            TaskShards(task.task_id, task.fence, dict(zip(self._makes, made, strict=True)))
            for task, made in zip(tasks, arrays, strict=True)
        ]
        receipts: list[Receipt] = []
        for file in [[put] for put in puts] if self._model.apart else [puts]:

            async def attempt(_: OnProgress, file: list[TaskShards] = file) -> list[Receipt]:
                return await self._data.put(file, store=self._store, deadline_s=DATA_CALL_S)

            receipts += await self.leases.persist(lease, "put", attempt, DATA_CALL_S)
        scalars: dict[str, Array] = {}
        if self._model.reward_kl:
            sums = [
                kl_sums(self._model.reward_kl, given, made[0], task.samples)
                for task, given, made in zip(tasks, shards, arrays, strict=True)
            ]
            scalars["kl"] = np.concatenate(sums)
        if self._model.sums:
            sums = [
                sample_sums(given, made[0], task.samples)
                for task, given, made in zip(tasks, shards, arrays, strict=True)
            ]
            scalars[REFERENCE_SCORE] = np.concatenate(sums)
        if self._model.refreshed:
            step = lease.grant.weights.step if lease.grant.weights is not None else 0
            scalars[REFERENCE_SCALAR] = np.full(sum(task.samples for task in tasks), step, np.float32)
        if self._model.head == "value":
            scores = np.concatenate([made[0] for made in arrays])
            scalars |= {REWARD_MODEL_PART: scores, REWARD: np.float32(self._model.weight) * scores}
        results = [
            TaskResult(
                task_id=task.task_id,
                fence=task.fence,
                outcome=Outcome.DONE,
                store=receipt.store,
                content_hash=receipt.content_hash,
                samples=task.samples,
                tokens=len(given[self._needs[0]]),
                nbytes=receipt.nbytes,
            )
            for task, receipt, given in zip(tasks, receipts, shards, strict=True)
        ]
        await self.leases.complete(lease, results, scalars)
        tokens = sum(len(given[self._needs[0]]) for given in shards)
        rate = tokens / max(seconds, 1e-9)
        self._service.telemetry.emit(
            self._model.name, {"tasks": len(tasks), "tokens": tokens, "seconds": seconds, "tokens_per_s": rate}
        )


def make_scorer(
    run: RunDir,
    instance: int,
    model: FrozenModel,
    group: Group,
    meeting: Meeting,
    retry: RewardRetry,
    away: Away,
) -> FrozenScorer:
    """Return a scorer that creates `model` on its compute thread. Raises BadInput.

    This imports torch. `group` holds the ranks that share the model; they have met, and open their process group at
    `meeting`.
    """
    from services.reference.scorer import FrozenScorer
    from shared.model.picks import Likeliest

    settings, folder = model.settings, model.folder
    check_model(run.path, f"{model.section}.model", str(folder))
    if model.head == "value" and (problem := without_head(str(folder))):
        raise BadInput(f"{model.section}.model: {folder}: {problem}")

    def whole() -> Frozen:
        from services.reference.frozen import FrozenTorch
        from shared.model.adapter import AdapterStart

        adapter = None if model.lora is None else AdapterStart(model.lora, model.seed)
        limit = settings.max_tokens_per_micro_batch
        return FrozenTorch(folder, model.dtype, limit, settings.device, model.passes, adapter, model.head)

    def pieces() -> Frozen:
        from services.reference.frozen_megatron import FrozenMegatron  # this is an optional extra
        from shared.ranks.process_group import open_group, own_device

        parallel = settings.parallel
        place = Layout(parallel.model_ranks, parallel.tp, parallel.pp, parallel.cp).place(group.rank)
        device = own_device(settings.device, place.rank)
        if group.world_size > 1:
            open_group(meeting, place, device, deadline_s=settings.collective_s)
        return FrozenMegatron(folder, model.dtype, settings.max_tokens_per_micro_batch, place, device, model.head)

    likeliest = Likeliest(model.top_k, model.readable) if model.top_k else None

    def served() -> Frozen:
        from services.reference.frozen_server import FrozenServer

        if model.server is None:
            raise BadInput("services.teacher.server is not set")
        return FrozenServer(model.server, folder, retry=retry, away=away, likeliest=likeliest)

    makers = {"torch": whole, "megatron": pieces}
    return FrozenScorer(
        served if model.server is not None else makers[settings.backend],
        source=folder,
        threads=settings.threads or 1,
        temperature=model.temperature,
        deterministic=model.deterministic,
        scratch=model.offloaded(run.path, instance) if model.shares_devices else None,
        ranks=group.world_size,
        likeliest=likeliest,
        head=model.head,
    )
