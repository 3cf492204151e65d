"""Works through leases, from loading the version that a lease needs to completing the lease: prepare, sample, finish.

Nothing is sampled with weights older than a lease allows.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from proto.messages import LeaseGrant, TaskResult, Trouble
from proto.tensors import Array
from services.rollout.engine import Engine
from services.rollout.results.assemble import Assembled, assemble, in_files, with_receipt
from services.rollout.results.lease_report import Sampled, report_lease, report_workflow
from services.rollout.results.named_values import NamedValues, named
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.results.trajectory import single_turns
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.score import Score
from services.rollout.sampling.answers import AnswerSampler
from services.rollout.sampling.prompts import messages_of
from services.rollout.sampling.tasks import TEXT_S, PreparedTasks, TaskSets, prepare
from services.rollout.weights.in_flight import InFlight
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import HeldVersion, WeightsSync
from services.rollout.weights.version_loader import Fetched, VersionLoader, WeightsGone
from services.rollout.weights.versions import BlockVersions
from services.rollout.workflows.calls import OnText
from services.rollout.workflows.runner import Made, WorkflowRunner
from shared.actor.service import Service
from shared.colocation.turns import OwnDevices, Turns
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.dataplane.stream import OnProgress
from shared.lease import Lease, LeaseBook
from shared.pipeline import LeasePipeline
from shared.sample import Sample
from shared.stages import ROLLOUT, TEXT, TRAIN

DATA_CALL_S = 30.0
SIDE_BY_SIDE = 2
"""Maximum number of leases that are sampled together. The second lease uses the rows that short samples of the first
leave free."""


@dataclass(frozen=True)
class _Prepared:
    """A lease's prompts and weights."""

    tasks: PreparedTasks
    weights: Fetched


class RolloutWorker:
    """Works through the leases of one engine. It is used only on the service's loop, which it never blocks.

    `VersionLoader` brings the version that a lease needs into the engine, and `report_lease` reports the samples.
    """

    def __init__(
        self,
        service: Service,
        *,
        engine: Engine,
        sync: WeightsSync,
        tasks: TaskSets,
        rewards: RewardPool,
        workflow: WorkflowRunner | None,
        answers: AnswerSampler,
        data: DataClient,
        source: WeightsSource,
        in_flight: InFlight,
        turns: Turns,
        store: str,
        block_tasks: int,
        filters: bool,
        on_text: OnText,
        texts: SampleTexts | None = None,
    ) -> None:
        """Without a `workflow`, a sample is one answer to its prompt. `turns` manages the process's turns on the
        engine's devices. `store` is the store for shards (`batch-store/0`); `block_tasks` is the maximum number of
        tasks in a lease. `filters` says whether the scheduler drops tasks whose rewards are all equal. `texts` builds
        the recorder's shards, if there is a recorder."""
        self._service = service
        self._engine = engine
        self._sync = sync
        self._tasks = tasks
        self._rewards = rewards
        self._workflow = workflow
        self._answer_sampler = answers
        self._data = data
        self._turns = turns
        self._sampling = 0
        self._store = store
        self._filters = filters
        self._on_text = on_text
        self._texts = texts
        self._names = NamedValues()
        self.leases = LeaseBook(service, ROLLOUT.name, lambda: engine.progress)
        self.leases.blocked_on_devices = lambda: turns.waiting
        self._versions = VersionLoader(
            self.leases, engine=engine, sync=sync, source=source, in_flight=in_flight, turns=turns
        )
        self._pipeline: LeasePipeline[_Prepared, Sampled] = LeasePipeline(
            self.leases,
            acquire=lambda: self.leases.acquire(block_tasks, lambda: (self.holds.lineage, self.holds.step)),
            prepare=self._prepare,
            compute=self._sample,
            finish=self._finish,
            # A service that takes turns on devices gives the devices back between leases.
            side_by_side=SIDE_BY_SIDE if engine.side_by_side and isinstance(turns, OwnDevices) else 1,
            may_lease=rewards.reachable,
        )

    @property
    def holds(self) -> HeldVersion:
        """The version that the engine has been proved to hold."""
        return self._sync.holds

    async def run(self) -> None:
        """Work until cancelled."""
        await self._pipeline.run()

    async def drain(self) -> None:
        """Stop sampling, finish the sampled leases if that is quick, and hand back the rest."""
        await self._pipeline.drain()

    def troubles(self) -> list[Trouble]:
        """Return the problems to report in the heartbeat."""
        return [*self._rewards.troubles(), *(self._workflow.troubles() if self._workflow is not None else [])]

    async def _prepare(self, lease: Lease) -> _Prepared:
        """Fetch the weights if they will be needed, and build the prompts."""
        weights = await self._versions.fetch_ahead(lease)
        return _Prepared(await prepare(self._tasks, lease, self._on_text), weights)

    async def _sample(self, lease: Lease, prepared: _Prepared) -> Sampled | None:
        """Acquire the devices, load the version if needed, and generate. Return None if the lease was handed back."""
        self._sampling += 1
        try:
            return await self._in_turn(lease, prepared)
        finally:
            self._sampling -= 1
            self.rest(but=lease)

    def rest(self, but: Lease | None = None) -> None:
        """Release the devices if no lease needs the engine. `but` is not counted, because it is done."""
        if not self._sampling and all(lease is but for lease in self.leases.uncomputed):
            self._turns.done()

    async def _in_turn(self, lease: Lease, prepared: _Prepared) -> Sampled | None:
        # A workflow's calls form many blocks, some of which would begin during a swap, so each lease has one version.
        exact = lease.grant.exact or self._workflow is not None
        try:
            versions, lineage = await self._versions.acquire(lease, prepared.weights, exact=exact)
        except WeightsGone as error:
            await self.leases.hand_back(lease, f"waited longer than its version lasted: {error}", untouched=True)
            return None
        try:
            return await self._sampled(lease, prepared, versions, lineage)
        finally:
            self._versions.release(versions)

    async def _sampled(
        self, lease: Lease, prepared: _Prepared, versions: BlockVersions, lineage: int
    ) -> Sampled | None:
        """Generate the samples, or return None if the lease was handed back. `versions` are the versions held while
        sampling."""
        grant, held = lease.grant, versions.first
        if held < grant.min_step or (grant.exact and held != grant.min_step):
            why = f"the engine holds version {held}, but {_needed(grant)}"
            await self.leases.hand_back(lease, why, untouched=True)
            return None
        lease.check()
        started = time.perf_counter()
        made: list[list[Made]] = []
        if self._workflow is not None:
            before_s = self._workflow.generate_s
            made = await self._workflow.run(lease, prepared.tasks, versions)
            return Sampled(made, held, self._workflow.generate_s - before_s, self._sync.last)
        if prepared.tasks.ready:
            made = await self._answers(lease, prepared.tasks, versions, lineage)
        seconds = time.perf_counter() - started
        what = "generate" if grant.split == TRAIN else "evaluate"
        self._service.telemetry.span(what, seconds, self.leases.about(lease))
        return Sampled(made, held, seconds, self._sync.last)

    async def _answers(
        self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions, lineage: int
    ) -> list[list[Made]]:
        """Sample the whole lease in one block, with one answer per sample. `_finish` adds the texts."""
        groups = await self._answer_sampler.sample(lease, tasks, versions, lineage)
        return [
            [
                Made(
                    rolled,
                    Sample(task.handle.task_id, task.row, [], "", each.token_ids.tolist(), each.finish_reason),
                    score=None,
                )
                for rolled, each in zip(single_turns(task.prompt_ids, group), group, strict=True)
            ]
            for task, group in zip(tasks.ready, groups, strict=True)
        ]

    async def _finish(self, lease: Lease, prepared: _Prepared, sampled: Sampled) -> None:
        """Score the samples, put the shards into the store and complete the lease."""
        tasks = prepared.tasks
        if self._workflow is None:
            await lease.within(TEXT_S, self._write_texts(tasks, sampled.made))
        with self.leases.part(lease, "reward"):
            scores = await self._scores(lease, sampled.made)
        samples = [[each.rolled for each in group] for group in sampled.made]
        values = [
            [named(score.parts, each.metrics) for each, score in zip(group, group_scores, strict=True)]
            for group, group_scores in zip(sampled.made, scores, strict=True)
        ]
        block = assemble(tasks.ready, samples, scores, min_survivors=tasks.min_survivors, named=values)
        dropped = [*block.dropped, *tasks.dropped]
        texts = await self._texts_of(lease, tasks, sampled.made, scores, [*block.results, *dropped])
        results = await self._put(lease, block, texts)
        dropped = await self._put_texts(lease, dropped, texts)
        brought = sampled.sync.scalars(len(block.scalars["reward"])) if sampled.sync is not None else {}
        scalars = block.scalars | brought | self._names.columns(block.named)
        await self.leases.complete(lease, [*results, *dropped], scalars)
        self._answer_sampler.forget(tasks.ready)
        report_lease(self._service, lease.grant.split, tasks, sampled, block, scores)
        if self._workflow is not None:
            report_workflow(self._service, sampled.made, self._workflow.lost_processes)
        self._service.telemetry.emit("engine", dict(self._engine.stats()))

    async def _texts_of(
        self,
        lease: Lease,
        tasks: PreparedTasks,
        made: list[list[Made]],
        scores: list[list[Score]],
        results: list[TaskResult],
    ) -> dict[str, Array]:
        """Return the texts of the tasks that are recorded, by task id."""
        texts = self._texts
        if texts is None or not any(texts.choice.takes(result.task_id) for result in results):
            return {}
        rows = tasks.not_sampled
        return await lease.within(TEXT_S, self._on_text(lambda: texts.shards(tasks.ready, made, scores, rows)))

    async def _put(self, lease: Lease, block: Assembled, texts: dict[str, Array]) -> list[TaskResult]:
        """Put the shards of a block into the store, each task's text with its shards, and return the block's results
        with the locations of the shards."""
        results = list(block.results)
        for result, shards in zip(results, block.shards, strict=True):
            shards |= {TEXT: texts[result.task_id]} if result.task_id in texts else {}
        for file in in_files(block, filters=self._filters) if results else ():
            puts = [TaskShards(results[i].task_id, results[i].fence, block.shards[i]) for i in file]
            receipts = await self.leases.persist(lease, "put", functools.partial(self._put_file, puts), DATA_CALL_S)
            for i, receipt in zip(file, receipts, strict=True):
                results[i] = with_receipt(results[i], receipt)
        return results

    async def _put_texts(self, lease: Lease, dropped: list[TaskResult], texts: dict[str, Array]) -> list[TaskResult]:
        """Put the texts of dropped tasks into the store, and return the tasks' results with the locations.

        They are put separately, because a file is freed only when its last task is cleared.
        """
        puts = [
            TaskShards(each.task_id, each.fence, {TEXT: texts[each.task_id]})
            for each in dropped
            if each.task_id in texts
        ]
        if not puts:
            return dropped
        receipts = await self.leases.persist(lease, "put", functools.partial(self._put_file, puts), DATA_CALL_S)
        found = {each.task_id: each for each in receipts}
        return [with_receipt(each, found[each.task_id]) if each.task_id in found else each for each in dropped]

    async def _put_file(self, puts: list[TaskShards], _: OnProgress) -> list[Receipt]:
        return await self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S)

    async def _write_texts(self, tasks: PreparedTasks, made: list[list[Made]]) -> None:
        """Decode the texts of single answers for the reward functions, while the next lease is being sampled."""
        ids = [[each.sample.token_ids for each in group] for group in made]
        texts: list[list[str]] = await self._on_text(
            lambda: [self._tasks.texts(group, tasks.sampling) for group in ids]
        )
        for group, group_texts in zip(made, texts, strict=True):
            for each, text in zip(group, group_texts, strict=True):
                each.sample.completion = text
                each.sample.messages = messages_of(each.sample.row, text)

    async def _scores(self, lease: Lease, made: list[list[Made]]) -> list[list[Score]]:
        """Return each sample's own score or, if it has none, the reward functions' score. Raises LeaseLost."""
        unscored = [[each.sample for each in group if each.score is None] for group in made]

        def advance() -> None:
            lease.advance()
            # Whatever ends the lease in the meantime, its tasks are not to blame for a judge that does not answer.
            lease.untouched = not self._rewards.reachable.is_set()

        scored = await lease.while_held(self._rewards.score(unscored, advance))
        lease.untouched = False
        found = [iter(group) for group in scored]
        return [[each.score or next(scores) for each in group] for group, scores in zip(made, found, strict=True)]


def _needed(grant: LeaseGrant) -> str:
    exactly = "exactly" if grant.exact else "at least"
    return f"the lease needs {exactly} {grant.min_step} and names no weights to load"
