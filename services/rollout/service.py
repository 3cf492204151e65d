"""The rollout actor starts an engine and everything around it, then works through leases.

A lease takes these steps: load the version that it needs, prepare, sample, finish, complete. Nothing is sampled with
weights older than the lease allows. Neither user code nor the model runs on the actor's event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from proto.messages import Ack, DrainService, Heartbeat, Trouble, WaitRow, WeightsRef
from services.rollout.engine import Engine
from services.rollout.engines import make_engine
from services.rollout.results.finish import LeaseResults
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.pool import RewardPool
from services.rollout.sampling.answers import AnswerSampler, PartialJournal
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import TaskSets, prepare
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.pool import UserPool
from services.rollout.weights.numbers import NumberedVersions
from services.rollout.weights.source import SHARDS, WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import EngineTransfers, Receiver
from services.rollout.weights.versions import EngineVersions
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from services.rollout.workflows.runner import WorkflowRunner
from shared.actor.own_store import own_store, own_store_stays
from shared.actor.service import Service
from shared.colocation.devices import ENGINE, WEIGHTS, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.dataplane.client import DataClient
from shared.inputs import Inputs, check_model
from shared.lease import LeaseBook
from shared.ranks.meeting import reach_hosts_by_nccl
from shared.rpc.mailbox import Call
from shared.rundir import RunDir
from shared.samples.text import Choice
from shared.stages import ROLLOUT
from shared.topology.capacity import context_tokens
from shared.topology.model_files import vocabulary
from shared.topology.models import POLICY_WORKER

if TYPE_CHECKING:
    from shared.topology import Topology
    from shared.topology.schema import Workflow
    from shared.topology.services import Rollout
import time

from proto.messages import LeaseGrant
from services.rollout.results.finish import Sampled
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.weights.versions import WeightsGone
from shared.lease import Lease
from shared.pipeline import LeasePipeline
from shared.stages import TRAIN

T = TypeVar("T")
SIDE_BY_SIDE = 2
"""Maximum number of leases that are sampled together. The second lease uses the rows that short samples of the first
leave free."""


@dataclass(frozen=True)
class EngineParts:
    """The engine of a rollout, if anything is sampled, with its leases and versions and the limits of its model."""

    engine: Engine | None
    leases: LeaseBook
    versions: EngineVersions | NumberedVersions
    vocab_size: int
    context_tokens: int
    """Maximum length of prompt plus completion, in tokens."""


@dataclass(frozen=True)
class RolloutParts:
    """The parts of a rollout that are used after the start. `work` runs beside the worker until the service ends; its
    end ends the service."""

    worker: RolloutWorker
    leases: LeaseBook
    versions: EngineVersions | NumberedVersions
    work: list[Callable[[], Awaitable[None]]]
    troubles: list[Callable[[], list[Trouble]]]
    waits: list[Callable[[], Awaitable[list[WaitRow]]]]


class RolloutService(Service):
    """One inference engine and everything around it."""

    NAME: ClassVar[str] = "rollout"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.mailbox.handle(DrainService, self._retire)
        self._text = ThreadPoolExecutor(1, thread_name_prefix="text")  # rows and the tokenizer: one thread at a time
        self._data = DataClient(self.client, reports=True)
        self._closing = AsyncExitStack()
        """Closes the parts, the last one first."""
        self._parts: RolloutParts | None = None
        """None until `start` has built the parts."""

    async def start(self) -> None:
        topology = await self._on_text(partial(_load_topology, self.run))
        self.telemetry.traced_share = topology.monitor.traced_share
        self._data.streams.plain = not topology.transport.encrypt_bulk
        self._parts = await self._build(topology)

    async def _build(self, topology: Topology) -> RolloutParts:
        """Start all parts. Users' code is loaded first, so that a failing import is reported before the model is
        loaded."""
        settings = _engine_settings(topology)
        rewards = await self._start_rewards(topology)
        model = Path(topology.policy.model)
        await self._on_text(partial(check_model, self.run.path, "policy.model", str(model)))
        chosen = topology.workflow
        pool, endpoint = await self._start_workflow(chosen, model.name) if chosen is not None else (None, None)
        journal = None
        if settings.partial_s is not None:
            journal = PartialJournal(self.run.path / "partial", settings.partial_s)
            self._closing.push_async_callback(asyncio.to_thread, journal.close)
        store = await own_store(self)
        engine_parts = await (
            self._start_engine(topology, settings, store) if topology.samples else self._no_engine(topology)
        )
        leases, versions = engine_parts.leases, engine_parts.versions
        template = topology.policy.chat_template
        prompts = await self._on_text(
            lambda: PromptBuilder(
                model,
                add_generation_prompt=template.add_generation_prompt,
                template_args=template.args,
                fixed_clock=topology.run.deterministic,
            )
        )
        await self._on_text(lambda: prompts.check_vocabulary(engine_parts.vocab_size))
        begun = Inputs.load(self.run.path).rows
        tasks = await self._on_text(lambda: TaskSets(topology, prompts, engine_parts.context_tokens, begun))
        self.keep(own_store_stays(self, store))
        functions = [term.function for term in topology.reward.terms]
        results = LeaseResults(
            self,
            leases,
            rewards=rewards,
            texts=SampleTexts(Choice.of(topology), prompts, functions, self._on_text),
            data=self._data,
            store=store,
            filters=topology.algorithm.filter_zero_variance is not None,
            per_token=topology.algorithm.advantage.per_token,
        )
        workflow = None
        if chosen is not None and pool is not None and endpoint is not None and engine_parts.engine is not None:
            workflow = WorkflowRunner(
                chosen.function,
                pool,
                endpoint,
                engine=engine_parts.engine,
                prompts=prompts,
                on_text=self._on_text,
                max_tokens=chosen.max_tokens,
            )
        worker = RolloutWorker(
            self,
            leases,
            engine=engine_parts.engine,
            versions=versions,
            prepare=lambda lease: prepare(tasks, lease, self._on_text),
            answers=AnswerSampler(engine_parts.engine, journal, ends=topology.policy.head == "value"),
            workflow=workflow,
            results=results,
            block_tasks=settings.block_tasks,
        )
        parts = RolloutParts(
            worker,
            leases,
            versions,
            work=[worker.run, versions.run, rewards.watch],
            troubles=[rewards.troubles],
            waits=[rewards.waits],
        )
        if pool is not None and endpoint is not None and workflow is not None:
            parts.work.append(pool.watch)
            parts.troubles.extend((workflow.troubles, endpoint.troubles))
            parts.waits.append(pool.waits)
        return parts

    async def _start_engine(self, topology: Topology, settings: Rollout, store: str) -> EngineParts:
        """Start the engine, and everything with which it loads and proves versions."""
        # Importing an engine takes seconds, so it happens off the loop, and the mailbox can answer in the meantime.
        engine = await self._on_text(
            lambda: make_engine(
                settings,
                policy=topology.policy,
                temperature=topology.sampling.temperature,
                deterministic=topology.run.deterministic,
                seed=topology.run.seed,
            )
        )
        self._closing.push_async_callback(engine.stop)
        source = self._weights_source(settings, engine, store)
        sync = WeightsSync(engine, self.name, self.telemetry.emit, source)
        self.progress = lambda: engine.progress

        async def leave(_: Parts) -> Parts:
            sync.forget()
            await engine.sleep()
            return ENGINE

        turns: Turns = take_turns(self, leave) if self.NAME in topology.colocated_services else OwnDevices()
        if settings.weights == "nccl" and self.run.scheduler and self.listen:  # the trainer is on another host
            reach_hosts_by_nccl(self.listen)
        # vLLM allocates all its memory when it starts.
        await turns.acquire(ENGINE if settings.engine == "vllm" else frozenset({WEIGHTS}))
        await engine.start()
        turns.done()
        leases = LeaseBook(self, ROLLOUT.name, lambda: engine.progress)
        versions = EngineVersions(
            leases,
            engine=engine,
            sync=sync,
            source=source,
            turns=turns,
            emit=self.telemetry.emit,
            in_flight=settings.in_flight != "wait",
        )
        return EngineParts(engine, leases, versions, engine.vocab_size, engine.context_tokens)

    async def _no_engine(self, topology: Topology) -> EngineParts:
        """Return what takes the place of an engine if nothing is sampled."""
        leases = LeaseBook(self, ROLLOUT.name, lambda: 0)
        size = await self._on_text(partial(vocabulary, topology.policy.model)) or sys.maxsize
        context = context_tokens(topology) or sys.maxsize
        return EngineParts(None, leases, NumberedVersions(), size, context)

    async def _start_rewards(self, topology: Topology) -> RewardPool:
        rewards = RewardPool(
            topology.reward.terms,
            timeout_s=topology.reward.timeout_s,
            memory_bytes=topology.reward.memory,
            processes=topology.reward.processes,
            retry=topology.reward.retry,
            emit=self.telemetry.emit,
        )
        self._closing.push_async_callback(rewards.close)
        await rewards.start()
        return rewards

    async def _start_workflow(self, workflow: Workflow, model: str) -> tuple[UserPool, OpenAIEndpoint]:
        """Start the processes that run the workflow and the endpoint that its agents call."""
        endpoint = OpenAIEndpoint(model)
        self._closing.push_async_callback(endpoint.stop)
        await endpoint.start()
        functions = [(workflow.function, workflow.params)]
        pool = UserPool(Setup(Purpose.WORKFLOW, functions, workflow.timeout_s, workflow.memory), workflow.processes)
        self._closing.push_async_callback(pool.close)
        # All processes are started before the first sample, because the samples of a lease are assigned at once.
        await pool.start(at_once=workflow.processes)
        return pool, endpoint

    def _weights_source(self, settings: Rollout, engine: Engine, store: str) -> WeightsSource:
        if settings.weights == SHARDS or settings.transfer_s is None:
            return WeightsSource(self._data, store, emit=self.telemetry.emit)
        transfers = EngineTransfers(
            self.run,
            self.client(POLICY_WORKER),
            instance=self.instance,
            incarnation=self.incarnation,
            deadline_s=settings.transfer_s,
            listen=lambda: self.listen,
        )
        source = WeightsSource(
            self._data,
            store,
            transfers=transfers,
            route=settings.weights,
            emit=self.telemetry.emit,
            engine=engine if isinstance(engine, Receiver) else None,
        )
        self._closing.callback(source.close)
        return source

    async def serve(self) -> None:
        if self._parts is None:
            return
        # If a process that runs users' code cannot be replaced, the service exits with an error.
        work = {asyncio.ensure_future(run()) for run in self._parts.work}
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def drain(self) -> None:
        if self._parts is not None:
            await self._parts.worker.drain()

    async def close(self) -> None:
        await self._closing.aclose()
        self._text.shutdown(wait=False, cancel_futures=True)
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._parts is None:
            return beat
        self._parts.versions.rest()  # nothing else ends a turn whose lease is lost before it is sampled
        holds = self._parts.versions.holds
        return msgspec.structs.replace(
            beat,
            holds_lineage=holds.lineage,
            holds_step=holds.step,
            leases=self._parts.leases.progress(),
            troubles=[trouble for troubles in self._parts.troubles for trouble in troubles()],
        )

    async def open_waits(self) -> list[WaitRow]:
        return [row for waits in self._parts.waits for row in await waits()] if self._parts is not None else []

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._parts is not None:
            self._parts.leases.lost(lease_ids)

    def on_newer_weights(self, ref: WeightsRef) -> None:
        if self._parts is not None:
            self._parts.versions.announce(ref)

    def _retire(self, _: DrainService, call: Call) -> Ack:
        if self._parts is None:
            self.request_stop()  # this process has not yet leased anything
        else:
            self._parts.leases.retired.set()
        return Ack()

    async def _on_text(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, work)


def _engine_settings(topology: Topology) -> Rollout:
    """Return the user's settings, with the sleep mode that colocation on a GPU requires of vLLM."""
    settings = topology.services.rollout
    if settings.engine != "vllm" or not settings.gpus or RolloutService.NAME not in topology.colocated_services:
        return settings
    return settings.model_copy(update={"engine_args": {**settings.engine_args, "enable_sleep_mode": True}})


def _load_topology(run: RunDir) -> Topology:
    from shared import topology

    return topology.load_resolved(run.topology)


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
    ) -> None:
        """Without a `workflow`, a sample is one answer to its prompt. Without an `engine`, nothing is sampled.
        `block_tasks` is the maximum number of tasks in a lease."""
        self._service = service
        self._leases = leases
        self._engine = engine
        self._versions = versions
        self._prepare_tasks = prepare
        self._answers = answers
        self._workflow = workflow
        self._results = results
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
