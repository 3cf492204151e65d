"""Works through the leases of an engine: brings the version that a lease needs into it, samples, and completes it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from proto.messages import LeaseGrant
from services.rollout.engine import Engine
from services.rollout.results.finish import LeaseResults, Sampled
from services.rollout.sampling.answers import AnswerSampler
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.weights.numbers import NumberedVersions
from services.rollout.weights.versions import EngineVersions, WeightsGone
from services.rollout.workflows.runner import WorkflowRunner
from shared.actor.service import Service
from shared.lease import Lease, LeaseBook
from shared.pipeline import LeasePipeline
from shared.rpc.errors import BadInput
from shared.stages import TRAIN

SIDE_BY_SIDE = 2
"""Maximum number of leases that are sampled together. The second lease uses the rows that short samples of the first
leave free."""


class RolloutWorker:
    """Works through the leases of one engine. It is used only on the service's loop, which it never blocks.

    `EngineVersions` brings the version that a lease needs into the engine; `LeaseResults` finishes the sampled leases.
    """

    def __init__(
        self,
        service: Service,
        leases: LeaseBook,
        *,
        engine: Engine | None,
        versions: EngineVersions | NumberedVersions,
        prepare: Callable[[Lease], Awaitable[PreparedTasks]],
        answers: AnswerSampler,
        workflow: WorkflowRunner | None,
        results: LeaseResults,
        block_tasks: int,
        whole_texts: bool = False,
    ) -> None:
        """Without a `workflow`, a sample is one answer to its prompt. Without an `engine`, nothing is sampled.
        `block_tasks` is the maximum number of tasks in a lease. With `whole_texts`, a reward model reads each sample as
        one conversation."""
        self._service = service
        self._leases = leases
        self._engine = engine
        self._versions = versions
        self._prepare_tasks = prepare
        self._answers = answers
        self._workflow = workflow
        self._results = results
        self._whole_texts = whole_texts
        self._pipeline: LeasePipeline[PreparedTasks, Sampled] = LeasePipeline(
            leases,
            acquire=lambda: leases.acquire(block_tasks, lambda: (versions.holds.lineage, versions.holds.step)),
            prepare=self._prepare,
            compute=self._sample,
            finish=self._finish,
            side_by_side=SIDE_BY_SIDE if versions.side_by_side else 1,
            may_lease=results.may_score,
        )

    async def run(self) -> None:
        """Work until cancelled."""
        await self._pipeline.run()

    async def drain(self) -> None:
        """Stop sampling, finish the sampled leases if that is quick, and hand back the rest."""
        await self._pipeline.drain()

    async def _prepare(self, lease: Lease) -> PreparedTasks:
        """Fetch the weights if they will be needed, and build the prompts."""
        await self._versions.fetch_ahead(lease)
        return await self._prepare_tasks(lease)

    async def _sample(self, lease: Lease, tasks: PreparedTasks) -> Sampled | None:
        """Acquire the devices, load the version if needed, and generate. Return None if the lease was handed back."""
        # A workflow's calls form many blocks, some of which would begin during a swap, so each lease has one version.
        exact = lease.grant.exact or self._workflow is not None
        try:
            async with self._versions.bring(lease, exact=exact) as versions:
                return await self._sampled(lease, tasks, versions)
        except WeightsGone as error:
            await self._leases.hand_back(lease, f"waited longer than its version lasted: {error}", untouched=True)
            return None

    async def _sampled(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> Sampled | None:
        """Generate the samples, or return None if the lease was handed back. `versions` are the versions held while
        sampling."""
        grant, step = lease.grant, versions.first
        if step < grant.min_step or (grant.exact and step != grant.min_step):
            why = f"the engine holds version {step}, but {_needed(grant)}"
            await self._leases.hand_back(lease, why, untouched=True)
            return None
        lease.check()
        tasks = replace(tasks, sampling=replace(tasks.sampling, swaps=versions.began))
        if self._workflow is not None:
            before_s = self._workflow.generate_s
            made = await self._workflow.run(lease, tasks, versions)
            seconds, lost = self._workflow.generate_s - before_s, self._workflow.lost_processes
            most = max((len(one.sequences) for group in made for one in group), default=0)
            if self._whole_texts and most > 1:
                text = f"made a sample of {most} sequences, but a reward model reads one conversation"
                raise BadInput(f"workflow.function {self._workflow.name} {text}; use another reward function")
            return Sampled(made, step, seconds, self._versions.last_sync, lost)
        started = time.perf_counter()
        made = await self._answers.run(lease, tasks, versions) if tasks.ready else []
        seconds = time.perf_counter() - started
        what = "generate" if grant.split == TRAIN else "evaluate"
        self._service.telemetry.span(what, seconds, self._leases.about(lease))
        return Sampled(made, step, seconds, self._versions.last_sync)

    async def _finish(self, lease: Lease, tasks: PreparedTasks, sampled: Sampled) -> None:
        """Complete the lease."""
        await self._results.finish(lease, tasks, sampled)
        self._answers.forget(tasks.ready)
        if self._engine is not None:
            self._service.telemetry.emit("engine", dict(self._engine.stats()))


def _needed(grant: LeaseGrant) -> str:
    exactly = "exactly" if grant.exact else "at least"
    return f"the lease needs {exactly} {grant.min_step} and names no weights to load"
