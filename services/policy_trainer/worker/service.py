"""The worker as an actor: accepts the driver's calls and runs them one by one, off the event loop.

It is one of `world_size` ranks, which join a group before anything else and exit together if one of them is gone.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from proto import messages
from proto.messages import ErrorCode, WaitKind, WaitRow, WorkerRequest
from proto.registry import Message
from services.policy_trainer.worker.call_queue import CallQueue
from services.policy_trainer.worker.devices import NEEDS
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.weights.sender import WeightsSender, perturbed_weights
from shared import topology as topologies
from shared.actor.service import Service
from shared.dataplane.client import DataClient
from shared.ranks.group import Group, GroupEnded, ends_with_its_peers
from shared.ranks.layout import Layout
from shared.ranks.meeting import Meeting, join, reach_hosts_by_nccl
from shared.rpc.errors import BadInput, RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir, service_name
from shared.samples.text import Choice
from shared.topology import stop_limit_s
from shared.topology.models import CRITIC, POLICY_WORKER, WORKERS, Publication

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend import Backend


class PolicyTrainerWorker(Service):
    """The service `python -m services.policy_trainer.worker`, which owns the model but not the algorithm."""

    NAME = POLICY_WORKER

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        topology = topologies.load_resolved(run.topology)
        models = {model.service: model for model in topology.trained}
        if self.NAME not in models:
            names = ", ".join(model.name for model in topology.trained)
            raise BadInput(f"{self.NAME}: this run trains no such model, only {names}; add it to the topology")
        self._model = models[self.NAME]
        settings, parallel = self._model.settings, self._model.settings.parallel
        place = Layout(settings.world_size, parallel.tp, parallel.pp, parallel.cp, parallel.ep).place(instance)
        self._group = Group(
            [service_name(self.NAME, rank) for rank in range(settings.world_size)],
            lambda rank: self.client(self.NAME, rank),
            instance,
            self.incarnation,
            deadline_s=settings.collective_s,
        )
        self._hosts = topology.hosts_of(settings, 1, settings.world_size)
        self._choice = Choice.of(topology) if self._model.publishes is not None else None
        self._pending = CallQueue()
        self._compute = ThreadPoolExecutor(1, "compute")
        data = DataClient(self.client, reports=True, plain=not topology.transport.encrypt_bulk)
        publishes = self._model.publishes if instance == 0 else None
        self._sender = self._weights_sender(publishes, data) if publishes is not None else None
        self._rank = Rank(run, self._model, place, self._group, data, self._compute, self, self._sender)
        self._runners: dict[type[WorkerRequest], Runner] = {}
        """The runner of each kind of call. It is empty until the model is loaded."""
        self.progress = lambda: self._rank.progress
        self.drain_s = stop_limit_s(topology)
        self._running = asyncio.Lock()
        self._current: tuple[str, float] | None = None
        """The name of the running call and the loop time at which it began."""
        for kind in NEEDS:
            self.mailbox.handle(kind, self._queue)
        self.mailbox.handle(messages.GetWorkerState, self._state)
        self.mailbox.handle(messages.Meet, self._group.on_meet)

    def _weights_sender(self, publishes: Publication, data: DataClient) -> WeightsSender | None:
        """Return a sender that lets engines request weights from this rank, or None if they only read stores."""
        if publishes.transfer_s is None:
            return None
        sender = WeightsSender(
            self.run,
            data,
            route=publishes.route,
            device="cuda:0" if self._model.settings.gpus else "cpu",  # rank 0's device (`own_device`)
            deadline_s=publishes.transfer_s,
            perturbed=functools.partial(perturbed_weights, self._model.folder, self._model.dtype),
            emit=self.telemetry.emit,
            listen=lambda: self.listen,
        )
        self.mailbox.handle(messages.AskTransfer, sender.ask)
        self.mailbox.handle(messages.EndTransfer, sender.end)
        return sender

    # ---- life

    async def start(self) -> None:
        """Join the group, then import torch and load the model before the driver's first call."""
        publishes = self._model.publishes
        if self.instance == 0 and publishes is not None and publishes.route == "nccl" and self.listen:
            reach_hosts_by_nccl(self.listen)
        with ends_with_its_peers(self):
            meeting = await join(self._group, self, self._hosts)
            await self._group.until_ended(self._load(meeting))

    async def _load(self, meeting: Meeting) -> None:
        """Open the process group at `meeting` and load the model, on the compute thread. Raises RpcError,
        GroupEnded."""
        devices = self._rank.devices
        if self._model.shares_devices:
            devices.share(self)
        await devices.acquire_room()

        def load() -> tuple[Backend, Mapping[type[WorkerRequest], Runner]]:
            # Imported on the compute thread, so that the mailbox keeps answering during the seconds that it takes.
            from services.policy_trainer.worker import start

            return start.load(self._rank, meeting, self._choice)

        backend, runners = await self._rank.together("load", load)
        devices.loaded(backend)
        self._runners.update(runners)

    async def serve(self) -> None:
        with ends_with_its_peers(self):
            await self._group.until_ended(self._serve_calls())

    async def _serve_calls(self) -> None:
        while True:
            waited = time.perf_counter()
            request, call = await self._pending.next()
            epoch = self._pending.epoch
            began = time.perf_counter()
            self.telemetry.span("call", began - waited, of="policy-trainer/0")
            # Calls without a step belong to the step that is being trained.
            step = getattr(request, "step", self._rank.standing.step + 1)
            async with self._running:
                self._current = (type(request).__name__, self.loop.time())
                try:
                    answer = await self._runners[type(request)](request, call)
                except Exception as error:
                    if isinstance(request, messages.ModelRequest) and not isinstance(error, GroupEnded):
                        self._rank.reader.forget(request)
                    else:
                        self._pending.fail(f"{type(request).__name__}: {error}"[:200], epoch=epoch)
                        self._rank.reader.forget_prefetched()
                    self._rank.refuse(request, call, error)
                    if isinstance(error, GroupEnded):
                        self._group.end(str(error))
                        raise
                else:
                    if isinstance(answer, Message):
                        call.reply(answer)
                    self.telemetry.span(type(request).__name__, time.perf_counter() - began, {"step": float(step)})
                finally:
                    self._current = None
                self._rank.devices.after(request, followed=self._pending.followed)

    async def drain(self) -> None:
        """Finish a checkpoint that is being written, but do not wait for a computation."""
        if self._sender is not None:
            self._sender.close()
        await self._rank.resources.aclose()
        self._compute.shutdown(wait=False, cancel_futures=True)

    async def open_waits(self) -> list[WaitRow]:
        if self._current is None:
            return []
        name, began = self._current
        return [WaitRow(WaitKind.COMPUTE, f"computes {name}", self.loop.time() - began)]

    # ---- mailbox

    def _queue(self, request: WorkerRequest, call: Call) -> Deferred:
        self._pending.add(request, call)
        self._rank.reader.prefetch(request)
        return DEFERRED

    async def _state(self, request: messages.GetWorkerState, _: Call) -> messages.WorkerState:
        """Wait for the running call, drop the gradients of an unfinished update, and return the worker's state."""
        self._pending.take_over(request.driver, request.at_least, request.turn)
        self._rank.reader.forget_prefetched()
        with suppress(RpcError):  # if the group has ended, this process exits or the answer below says so
            await self._group.withdraw("a driver takes over")
        async with self._running:
            await self._rank.drop_gradients()
            self._rank.standings.forget_clients()
            if self._pending.driver != request.driver:
                raise RpcError(
                    ErrorCode.CONFLICT, f"driver {request.driver:x} was replaced in the meantime; it must exit"
                )
            return messages.WorkerState(
                step=self._rank.standing.step,
                driver=self._pending.driver,
                order=self._pending.done,
                dirty=self._rank.standing.dirty,
                snapshots=self._rank.standings.held(),
            )


class CriticWorker(PolicyTrainerWorker):
    """The service `python -m services.policy_trainer.worker --model critic`."""

    NAME = WORKERS[CRITIC]
