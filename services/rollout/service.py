"""The rollout actor starts an engine and everything around it, then works through leases or, in a run that serves
clients, answers the server's requests (`services.rollout.direct`).

A lease takes these steps: load the version that it needs, prepare, sample, finish, complete. Nothing is sampled with
weights older than the lease allows. Neither user code nor the model runs on the actor's event loop.
"""

from __future__ import annotations

import asyncio
import sys
import typing
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from proto.messages import Ack, DrainService, ErrorCode, Heartbeat, Trouble, WaitRow, WeightsRef
from proto.registry import Message
from services.rollout.direct.desk import DirectRequest, SampleDesk
from services.rollout.direct.gate import ScoreGate
from services.rollout.direct.named import NamedVersions
from services.rollout.engine import Engine
from services.rollout.engines import make_engine
from services.rollout.results.finish import LeaseResults
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.pool import RewardPool
from services.rollout.sampling.answers import AnswerSampler, PartialJournal
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.reader import TextReader
from services.rollout.sampling.tasks import TaskSets, prepare
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.pool import UserPool
from services.rollout.weights.numbers import NumberedVersions
from services.rollout.weights.source import SHARDS, WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import EngineTransfers, Receiver
from services.rollout.weights.versions import EngineVersions
from services.rollout.worker import RolloutWorker
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from services.rollout.workflows.runner import WorkflowRunner
from shared.actor.own_store import own_store, own_store_stays
from shared.actor.service import Service
from shared.colocation.devices import ENGINE, WEIGHTS, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.dataplane.client import DataClient
from shared.inputs import Inputs, check_model
from shared.lease import LeaseBook
from shared.parcel import Parcels
from shared.ranks.meeting import reach_hosts_by_nccl
from shared.rpc.errors import BadInput, RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir
from shared.samples.text import Choice
from shared.stages import ROLLOUT, ROUTES
from shared.topology.capacity import context_tokens
from shared.topology.lora import live_adapters
from shared.topology.model_files import vocabulary
from shared.topology.models import POLICY_WORKER, REWARD_MODEL_SECTION

if TYPE_CHECKING:
    from shared.topology import Topology
    from shared.topology.schema import Workflow
    from shared.topology.services import Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class EngineParts:
    """An engine and what brings versions into it."""

    engine: Engine
    source: WeightsSource
    sync: WeightsSync
    turns: Turns


@dataclass(frozen=True)
class LeaseParts:
    """The parts of a rollout that works through leases."""

    worker: RolloutWorker
    leases: LeaseBook
    versions: EngineVersions | NumberedVersions


@dataclass(frozen=True)
class RolloutParts:
    """The parts of a rollout that are used after the start. `work` runs until the service ends; its end ends the
    service. A rollout that answers a server has no `leased` parts."""

    work: list[Callable[[], Awaitable[None]]]
    leased: LeaseParts | None = None
    troubles: list[Callable[[], list[Trouble]]] = field(default_factory=list)
    waits: list[Callable[[], Awaitable[list[WaitRow]]]] = field(default_factory=list)


class RolloutService(Service):
    """One inference engine and everything around it."""

    NAME: ClassVar[str] = "rollout"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.mailbox.handle(DrainService, self._retire)
        for request in typing.get_args(DirectRequest):
            self.mailbox.handle(request, self._answer)
        self._text = ThreadPoolExecutor(1, thread_name_prefix="text")  # rows and the tokenizer: one thread at a time
        self._data = DataClient(self.client, reports=True)
        self._closing = AsyncExitStack()
        """Closes the parts, the last one first."""
        self._desk: SampleDesk | None = None
        """Answers a server; None before that, and in training runs."""
        self._parts: RolloutParts | None = None
        """None until `start` has built the parts."""

    async def start(self) -> None:
        topology = await self._on_text(partial(_load_topology, self.run))
        self.telemetry.traced_share = topology.monitor.traced_share
        self._data.streams.plain = not topology.transport.encrypt_bulk
        self._parts = await (self._build(topology) if topology.serve is None else self._build_direct(topology))

    async def _build_direct(self, topology: Topology) -> RolloutParts:
        """Start the parts that answer a server. Raises BadInput for an engine that takes turns."""
        if self.NAME in topology.colocated_services:
            raise BadInput("placement.colocate: an engine that serves clients never sleeps; take rollout out of it")
        await self._on_text(partial(check_model, self.run.path, "policy.model", topology.policy.model))
        store = await own_store(self)
        parts = await self._start_engine(topology, store)
        self.keep(own_store_stays(self, store))
        prompts = await self._start_prompts(topology, parts.engine.vocab_size)
        gate = ScoreGate(needed=parts.engine.scores_alone)
        versions = NamedVersions(parts.engine, parts.sync, parts.source, gate, _live(topology))
        parcels = Parcels(self._data, self.client, store=store, incarnation=self.incarnation)
        desk = self._desk = SampleDesk(
            self.name,
            engine=parts.engine,
            versions=versions,
            gate=gate,
            prompts=prompts,
            parcels=parcels,
            on_text=self._on_text,
            emit=self.telemetry.emit,
            hang_s=topology.lease.lease_s,
        )
        return RolloutParts([desk.run])

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
        parts = await self._start_engine(topology, store) if topology.samples else None
        engine = None if parts is None else parts.engine
        self.keep(own_store_stays(self, store))
        if engine is None:
            vocab_size, longest = await self._on_text(partial(_model_limits, topology))
        else:
            vocab_size, longest = engine.vocab_size, engine.context_tokens
        prompts = await self._start_prompts(topology, vocab_size)
        begun = Inputs.load(self.run.path).rows
        reader = await self._on_text(lambda: _trained_reader(topology))
        tasks = await self._on_text(lambda: TaskSets(topology, prompts, longest, begun, reader))
        leases = LeaseBook(self, ROLLOUT.name, lambda: 0 if engine is None else engine.progress)
        versions: EngineVersions | NumberedVersions = NumberedVersions()
        if parts is not None:
            versions = EngineVersions(
                leases,
                engine=parts.engine,
                sync=parts.sync,
                source=parts.source,
                turns=parts.turns,
                emit=self.telemetry.emit,
                in_flight=settings.in_flight != "wait",
            )
        functions = [term.function for term in topology.reward.terms]
        results = LeaseResults(
            self,
            leases,
            rewards=rewards,
            texts=SampleTexts(
                Choice.of(topology),
                prompts,
                functions,
                self._on_text,
                await self._on_text(lambda: _reader(self.run, topology)),
                most_read=topology.read_tokens,
                single=chosen is None,
            ),
            data=self._data,
            store=store,
            filters=topology.algorithm.filter_zero_variance is not None,
            per_token=topology.algorithm.advantage.per_token,
            scored_later=topology.reward_model is not None,
        )
        workflow = None
        if chosen is not None and pool is not None and endpoint is not None and engine is not None:
            workflow = WorkflowRunner(
                chosen.function,
                pool,
                endpoint,
                engine=engine,
                prompts=prompts,
                on_text=self._on_text,
                max_tokens=chosen.max_tokens,
            )
        worker = RolloutWorker(
            self,
            leases,
            engine=engine,
            versions=versions,
            prepare=lambda lease: prepare(tasks, lease, self._on_text),
            answers=AnswerSampler(engine, journal, ends=topology.policy.head == "value"),
            workflow=workflow,
            results=results,
            block_tasks=settings.block_tasks,
            whole_texts=topology.reward_model is not None,
        )
        made = RolloutParts(
            [worker.run, versions.run, rewards.watch],
            LeaseParts(worker, leases, versions),
            troubles=[rewards.troubles],
            waits=[rewards.waits],
        )
        if pool is not None and endpoint is not None and workflow is not None:
            made.work.append(pool.watch)
            made.troubles.extend((workflow.troubles, endpoint.troubles))
            made.waits.append(pool.waits)
        return made

    async def _start_engine(self, topology: Topology, store: str) -> EngineParts:
        """Start the engine in the memory that it may use now."""
        settings = _engine_settings(topology)
        # Importing an engine takes seconds, so it happens off the loop, and the mailbox can answer in the meantime.
        engine = await self._on_text(
            lambda: make_engine(
                settings,
                policy=topology.policy,
                temperature=topology.sampling.temperature,
                deterministic=topology.run.deterministic,
                seed=topology.run.seed,
                live=_live(topology),
                routes=topology.algorithm.route_key == ROUTES,
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
        return EngineParts(engine, source, sync, turns)

    async def _start_prompts(self, topology: Topology, vocab_size: int) -> PromptBuilder:
        template = topology.policy.chat_template
        prompts = await self._on_text(
            lambda: PromptBuilder(
                Path(topology.policy.model),
                add_generation_prompt=template.add_generation_prompt,
                template_args=template.args,
                fixed_clock=topology.run.deterministic,
            )
        )
        await self._on_text(lambda: prompts.check_vocabulary(vocab_size))
        return prompts

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
        if self._parts is not None and self._parts.leased is not None:
            await self._parts.leased.worker.drain()

    async def close(self) -> None:
        await self._closing.aclose()
        self._text.shutdown(wait=False, cancel_futures=True)
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._parts is None or self._parts.leased is None:
            return beat
        leased = self._parts.leased
        leased.versions.rest()  # nothing else ends a turn whose lease is lost before it is sampled
        holds = leased.versions.holds
        return msgspec.structs.replace(
            beat,
            holds_lineage=holds.lineage,
            holds_step=holds.step,
            leases=leased.leases.progress(),
            troubles=[trouble for troubles in self._parts.troubles for trouble in troubles()],
        )

    async def open_waits(self) -> list[WaitRow]:
        return [row for waits in self._parts.waits for row in await waits()] if self._parts is not None else []

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._parts is not None and self._parts.leased is not None:
            self._parts.leased.leases.lost(lease_ids)

    def on_newer_weights(self, ref: WeightsRef) -> None:
        if self._parts is not None and self._parts.leased is not None:
            self._parts.leased.versions.announce(ref)

    def _retire(self, _: DrainService, call: Call) -> Ack:
        if self._parts is None or self._parts.leased is None:
            self.request_stop()  # this process has not leased anything
        else:
            self._parts.leased.leases.retired.set()
        return Ack()

    async def _answer(self, request: DirectRequest, _: Call) -> Message:
        if self._desk is None:
            raise RpcError(ErrorCode.NOT_READY, f"{self.name} is starting, or works through leases")
        return await self._desk.answer(request)

    async def _on_text(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, work)


def _engine_settings(topology: Topology) -> Rollout:
    """Return the user's settings, with the sleep mode that colocation on a GPU requires of vLLM."""
    settings = topology.services.rollout
    if settings.engine != "vllm" or not settings.gpus or RolloutService.NAME not in topology.colocated_services:
        return settings
    return settings.model_copy(update={"engine_args": {**settings.engine_args, "enable_sleep_mode": True}})


def _live(topology: Topology) -> int:
    """Return the number of versions with which the engine samples at the same time."""
    if topology.policy.lora is None:
        return 1
    serve = topology.serve
    return live_adapters(topology.services.rollout.in_flight, None if serve is None else serve.max_models)


def _model_limits(topology: Topology) -> tuple[int, int]:
    """Return the number of token ids of the model, and the maximum length of prompt plus completion, in tokens, for a
    run that samples nothing."""
    return vocabulary(topology.policy.model) or sys.maxsize, context_tokens(topology) or sys.maxsize


def _reader(run: RunDir, topology: Topology) -> TextReader | None:
    """Return what makes the tokens for the reward model, or None without one. Raises BadInput."""
    if topology.reward_model is None:
        return None
    model = topology.reward_model.model
    check_model(run.path, f"{REWARD_MODEL_SECTION}.model", model)
    return TextReader(Path(model), fixed_clock=topology.run.deterministic)


def _trained_reader(topology: Topology) -> TextReader | None:
    """Return what reads the texts from which a value head is trained, or None if the policy has none."""
    if topology.policy.head != "value":
        return None
    args = topology.policy.chat_template.args
    return TextReader(Path(topology.policy.model), template_args=args, fixed_clock=topology.run.deterministic)


def _load_topology(run: RunDir) -> Topology:
    from shared import topology

    return topology.load_resolved(run.topology)
