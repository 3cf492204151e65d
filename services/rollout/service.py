"""The rollout actor starts an engine and everything around it, then works through leases (`worker`).

Neither user code nor the model runs on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from proto.messages import Ack, DrainService, Heartbeat, WaitRow, WeightsRef
from services.rollout.engine import Engine
from services.rollout.engines import make_engine
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.pool import RewardPool
from services.rollout.sampling.answers import AnswerSampler
from services.rollout.sampling.partial import PartialJournal
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import TaskSets
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.pool import UserPool
from services.rollout.weights.in_flight import InFlight
from services.rollout.weights.shared_source import SharedSource
from services.rollout.weights.source import SHARDS, ShardSource, TransferSource, WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import EngineTransfers, Receiver
from services.rollout.worker import RolloutWorker
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from services.rollout.workflows.runner import WorkflowRunner
from shared.actor.own_store import own_store, own_store_stays
from shared.actor.service import Service
from shared.colocation.devices import ENGINE, WEIGHTS, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.dataplane.client import DataClient
from shared.inputs import Inputs, check_model
from shared.ranks.meeting import reach_hosts_by_nccl
from shared.rpc.mailbox import Call
from shared.rundir import RunDir
from shared.samples.choice import Choice
from shared.topology.models import POLICY_WORKER

if TYPE_CHECKING:
    from shared.topology import Topology
    from shared.topology.services import Rollout

T = TypeVar("T")


class RolloutService(Service):
    """One inference engine and everything around it."""

    NAME: ClassVar[str] = "rollout"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.mailbox.handle(DrainService, self._retire)
        self._text = ThreadPoolExecutor(1, thread_name_prefix="text")  # rows and the tokenizer: one thread at a time
        self._data = DataClient(self.client, reports=True)
        self._engine: Engine | None = None
        self._rewards: RewardPool | None = None
        self._workflows: UserPool | None = None
        self._endpoint: OpenAIEndpoint | None = None
        self._answers: AnswerSampler | None = None
        self._worker: RolloutWorker | None = None
        self._in_flight: InFlight | None = None
        self._source: TransferSource | None = None

    async def start(self) -> None:
        """Start all parts. Users' code is loaded first, so that a failing import is reported before the model is
        loaded."""
        topology = await self._on_text(lambda: _load_topology(self.run))
        settings = _engine_settings(topology)
        self.telemetry.traced_share = topology.services.monitor.traced_share
        self._data.streams.plain = not topology.transport.encrypt_bulk
        rewards = self._rewards = RewardPool(
            topology.reward.terms,
            timeout_s=topology.reward.timeout_s,
            memory_bytes=topology.reward.memory,
            processes=topology.reward.processes,
            retry=topology.reward.retry,
            emit=self.telemetry.emit,
        )
        await rewards.start()
        chosen = topology.workflow
        model = Path(topology.policy.model)
        await self._on_text(lambda: check_model(self.run.path, "policy.model", str(model)))
        if chosen is not None:
            self._endpoint = OpenAIEndpoint(model.name)
            await self._endpoint.start()
            functions = [(chosen.function, chosen.params)]
            setup = Setup(Purpose.WORKFLOW, functions, chosen.timeout_s, chosen.memory)
            self._workflows = UserPool(setup, chosen.processes)
            # All processes are started before the first sample, because the samples of a lease are assigned at once.
            await self._workflows.start(at_once=chosen.processes)
        # Importing an engine takes seconds, so it happens off the loop, and the mailbox can answer in the meantime.
        engine = self._engine = await self._on_text(
            lambda: make_engine(
                settings,
                policy=topology.policy,
                temperature=topology.sampling.temperature,
                deterministic=topology.run.deterministic,
            )
        )
        store = await own_store(self)
        source = SharedSource(self._weights_source(settings, engine, store))
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
        add_prompt = topology.policy.chat_template.add_generation_prompt
        prompts = await self._on_text(lambda: PromptBuilder(model, add_generation_prompt=add_prompt))
        await self._on_text(lambda: prompts.check_vocabulary(engine.vocab_size))
        begun = Inputs.load(self.run.path).rows
        tasks = await self._on_text(lambda: TaskSets(topology, prompts, engine.context_tokens, begun))
        workflow: WorkflowRunner | None = None
        if chosen is not None and self._workflows is not None and self._endpoint is not None:
            workflow = WorkflowRunner(
                chosen.function,
                self._workflows,
                self._endpoint,
                engine=engine,
                prompts=prompts,
                on_text=self._on_text,
                max_tokens=chosen.max_tokens,
            )
        self.keep(own_store_stays(self, store))
        every_s = settings.partial_s
        journal = PartialJournal(self.run.path / "partial", every_s) if every_s is not None else None
        self._answers = AnswerSampler(engine, journal)
        in_flight = InFlight(engine, sync, source, self.telemetry.emit)
        self._in_flight = None if settings.in_flight == "wait" else in_flight
        recorded = Choice.of(topology)
        self._worker = RolloutWorker(
            self,
            engine=engine,
            sync=sync,
            tasks=tasks,
            rewards=rewards,
            workflow=workflow,
            answers=self._answers,
            data=self._data,
            source=source,
            in_flight=in_flight,
            turns=turns,
            store=store,
            block_tasks=settings.block_tasks,
            filters=topology.algorithm.filter_zero_variance is not None,
            on_text=self._on_text,
            texts=SampleTexts(recorded, prompts, [term.function for term in topology.reward.terms])
            if recorded is not None
            else None,
        )

    def _weights_source(self, settings: Rollout, engine: Engine, store: str) -> WeightsSource:
        shards = ShardSource(self._data, store)
        if settings.weights == SHARDS or settings.transfer_s is None:
            return shards
        transfers = EngineTransfers(
            self.run,
            self.client(POLICY_WORKER),
            instance=self.instance,
            incarnation=self.incarnation,
            deadline_s=settings.transfer_s,
            listen=lambda: self.listen,
        )
        receiver = engine if isinstance(engine, Receiver) else None
        self._source = TransferSource(
            transfers, shards, route=settings.weights, emit=self.telemetry.emit, engine=receiver
        )
        return self._source

    async def serve(self) -> None:
        if self._worker is None or self._rewards is None:
            return
        # If a process that runs users' code cannot be replaced, the service exits with an error.
        work = {asyncio.create_task(self._worker.run()), asyncio.create_task(self._rewards.watch())}
        if self._workflows is not None:
            work.add(asyncio.create_task(self._workflows.watch()))
        if self._in_flight is not None:
            work.add(asyncio.create_task(self._in_flight.run()))
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def drain(self) -> None:
        if self._worker is not None:
            await self._worker.drain()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
        if self._answers is not None:
            await asyncio.to_thread(self._answers.close)
        if self._rewards is not None:
            await self._rewards.close()
        if self._workflows is not None:
            await self._workflows.close()
        if self._endpoint is not None:
            await self._endpoint.stop()
        if self._source is not None:
            self._source.close()
        self._text.shutdown(wait=False, cancel_futures=True)
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._worker is None:
            return beat
        self._worker.rest()  # nothing else ends a turn whose lease is lost before it is sampled
        holds = self._worker.holds
        return msgspec.structs.replace(
            beat,
            holds_lineage=holds.lineage,
            holds_step=holds.step,
            leases=self._worker.leases.progress(),
            troubles=[*self._worker.troubles(), *(self._endpoint.troubles() if self._endpoint is not None else [])],
        )

    async def open_waits(self) -> list[WaitRow]:
        rows = await self._rewards.waits() if self._rewards is not None else []
        return rows + (await self._workflows.waits() if self._workflows is not None else [])

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._worker is not None:
            self._worker.leases.lost(lease_ids)

    def on_newer_weights(self, ref: WeightsRef) -> None:
        if self._in_flight is not None:
            self._in_flight.announce(ref)

    def _retire(self, _: DrainService, call: Call) -> Ack:
        if self._worker is None:
            self.request_stop()  # this process has not yet leased anything
        else:
            self._worker.leases.retired.set()
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
