"""The worker as an actor: accepts the driver's calls and runs them one by one, off the event loop.

It is one of `world_size` ranks, which join a group before anything else and exit together if one of them is gone.
"""

from __future__ import annotations

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from proto import messages
from proto.messages import ErrorCode, WaitKind, WaitRow, WorkerRequest
from proto.registry import Message
from services.policy_trainer.worker.call_queue import CallQueue
from services.policy_trainer.worker.calls import RUNNERS, Calls
from services.policy_trainer.worker.weights.sender import WeightsSender, perturbed_weights
from shared import topology as topologies
from shared.actor.service import Service
from shared.dataplane.client import DataClient
from shared.ranks.group import Group, GroupEnded, ends_with_its_peers
from shared.ranks.layout import Layout
from shared.ranks.meeting import join, reach_hosts_by_nccl
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir, service_name
from shared.topology import Topology, stop_limit_s


class PolicyTrainerWorker(Service):
    """The service `python -m services.policy_trainer.worker`, which owns the model but not the algorithm."""

    NAME = "policy-trainer-worker"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        topology = topologies.load_resolved(run.topology)
        options = topology.services.policy_trainer
        parallel = options.parallel
        self._place = Layout(options.world_size, parallel.tp, parallel.pp, parallel.cp).place(instance)
        self._group = Group(
            [service_name(self.NAME, rank) for rank in range(options.world_size)],
            lambda rank: self.client(self.NAME, rank),
            instance,
            self.incarnation,
            deadline_s=options.collective_s,
        )
        self._hosts = topology.hosts_of(options, 1, options.world_size)
        self._pending = CallQueue()
        self._compute = ThreadPoolExecutor(1, "compute")
        self._data = DataClient(self.client, reports=True, plain=not topology.transport.encrypt_bulk)
        self._calls = Calls(run, topology, self._place, self._group, self._data, self._compute, self)
        self.progress = lambda: self._calls.progress
        self.drain_s = stop_limit_s(topology)
        self._sender: WeightsSender | None = None
        self._sends_by_nccl = instance == 0 and topology.services.rollout.weights == "nccl"
        if instance == 0 and topology.services.rollout.transfer_s is not None:
            self._send_weights(topology, topology.services.rollout.transfer_s)
        self._running = asyncio.Lock()
        self._current: tuple[str, float] | None = None
        """The name of the running call and the loop time at which it began."""
        for kind in RUNNERS:
            self.mailbox.handle(kind, self._queue)
        self.mailbox.handle(messages.GetWorkerState, self._state)
        self.mailbox.handle(messages.Meet, self._group.on_meet)

    def _send_weights(self, topology: Topology, deadline_s: float) -> None:
        """Let engines request weights from this rank."""
        policy, rollout = topology.policy, topology.services.rollout
        sender = self._sender = WeightsSender(
            self.run,
            self._data,
            route=rollout.weights,
            device="cuda:0" if topology.services.policy_trainer.gpus else "cpu",  # rank 0's device (`own_device`)
            deadline_s=deadline_s,
            perturbed=functools.partial(perturbed_weights, Path(policy.model), policy.dtype),
            emit=self.telemetry.emit,
            listen=lambda: self.listen,
        )
        self._calls.on_published = sender.published
        self._calls.on_changing = sender.changing
        self.mailbox.handle(messages.AskTransfer, sender.ask)
        self.mailbox.handle(messages.EndTransfer, sender.end)

    # ---- life

    async def start(self) -> None:
        """Join the group, then import torch and load the model before the driver's first call."""
        if self._sends_by_nccl and self.listen:
            reach_hosts_by_nccl(self.listen)
        with ends_with_its_peers(self):
            meeting = await join(self._group, self, self._hosts)
            await self._group.until_ended(self._calls.load(meeting))

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
            step = getattr(request, "step", self._calls.step + 1)
            async with self._running:
                self._current = (type(request).__name__, self.loop.time())
                try:
                    answer = await self._calls.run(request, call)
                except Exception as error:
                    self._pending.fail(f"{type(request).__name__}: {error}"[:200], epoch=epoch)
                    self._calls.reader.forget_prefetched()
                    self._calls.refuse(request, call, error)
                    if isinstance(error, GroupEnded):
                        self._group.end(str(error))
                        raise
                else:
                    if isinstance(answer, Message):
                        call.reply(answer)
                    self.telemetry.span(type(request).__name__, time.perf_counter() - began, {"step": float(step)})
                finally:
                    self._current = None
                self._calls.devices.after(request, followed=self._pending.followed)

    async def drain(self) -> None:
        """Finish a checkpoint that is being written, but do not wait for a computation."""
        if self._sender is not None:
            self._sender.close()
        await self._calls.close()
        self._compute.shutdown(wait=False, cancel_futures=True)

    async def open_waits(self) -> list[WaitRow]:
        if self._current is None:
            return []
        name, began = self._current
        return [WaitRow(WaitKind.COMPUTE, f"computes {name}", self.loop.time() - began)]

    # ---- mailbox

    def _queue(self, request: WorkerRequest, call: Call) -> Deferred:
        self._pending.add(request, call)
        self._calls.reader.prefetch(request)
        return DEFERRED

    async def _state(self, request: messages.GetWorkerState, _: Call) -> messages.WorkerState:
        """Wait for the running call, drop the gradients of an unfinished update, and return the worker's state."""
        self._pending.take_over(request.driver, request.at_least, request.turn)
        self._calls.reader.forget_prefetched()
        with suppress(RpcError):  # if the group has ended, this process exits or the answer below says so
            await self._group.withdraw("a driver takes over")
        async with self._running:
            await self._calls.drop_gradients()
            if self._pending.driver != request.driver:
                raise RpcError(
                    ErrorCode.CONFLICT, f"driver {request.driver:x} was replaced in the meantime; it must exit"
                )
            return messages.WorkerState(
                step=self._calls.step,
                driver=self._pending.driver,
                order=self._pending.done,
                dirty=self._calls.dirty,
                snapshots=self._calls.snapshots.held(),
            )
