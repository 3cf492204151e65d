"""The life of a service: mailbox up, STARTING, READY, DRAINING, STOPPED or FAILED; heartbeats all the way.

The loop's thread never computes: a service's heavy work runs on threads of its own, so that the mailbox answers and
the heartbeat goes on. A hung working thread is found by its lease's progress, not by silence here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket as host_names
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import psutil
import structlog
import zmq

from proto import messages
from proto.errors import WireError
from proto.ids import new_incarnation
from proto.messages import ErrorCode, Ping, Pong, ServiceReport
from shared.actor.log_page import page
from shared.actor.refusals import report_refusals
from shared.actor.telemetry import TelemetrySender
from shared.rpc.client import Client
from shared.rpc.directory import Directory
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rpc.transport import LINGER_MS
from shared.rundir import RunDir, service_name
from shared.security import keys
from shared.security.curve import check_listen, is_tcp
from shared.security.keys import Keyring
from shared.security.roles import Role
from shared.security.zap import Gate

HEARTBEAT_S = 1.0
DRAIN_S = 10.0
CALL_S = 10.0
REGISTER_AGAIN_S = 0.05
"""Between a heartbeat that a restarted scheduler did not know and the new registration."""
LAST_REPORTS_S = 1.0
FAILED_STATUS = 1
PEER_LOST_STATUS = os.EX_TEMPFAIL
"""Exit status (75) of a process that ends because another one that it cannot do without is gone."""
UNUSABLE_STATUS = os.EX_CONFIG
"""Exit status (78) of a process whose start was refused (`bad_request`): another start would be refused too."""


class State:
    """The states of a service, in the order of its life."""

    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class Service:
    """Base of every actor. Override `start`, `serve`, `drain`; add handlers to `self.mailbox` in `__init__`.

    Runs in a process through `shared.actor.process.run_process`, or on a thread in tests. Everything here belongs to
    one event loop; other threads talk to it with `asyncio.run_coroutine_threadsafe(..., self.loop)`.
    """

    NAME: ClassVar[str] = ""
    HEARTBEATS: ClassVar[bool] = True
    """Registers at the scheduler and sends it heartbeats (everyone but the scheduler itself)."""

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        """`supervisor`: the endpoint to report states to; empty when started by hand."""
        self.run = run
        self.instance = instance
        self.incarnation = new_incarnation()
        self.state = State.STARTING
        self.cause = ""
        self.exit_status = FAILED_STATUS
        """What the process ends with when this life FAILED."""
        self.name = service_name(self.NAME, instance)
        self.mailbox = Mailbox(self.name, self.incarnation)
        self.telemetry = TelemetrySender(self.NAME, instance, self.incarnation)
        self.log = structlog.get_logger(self.NAME)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.endpoint = ""
        self.stopping = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop
        self.listen = ""
        """`tcp://ADDRESS:PORT` to answer other hosts at; set before the service runs."""
        self._keys: Keyring | None = None
        self._gate: Gate | None = None
        self._directory: Directory | None = None
        self._supervisor = supervisor
        self._clients: dict[tuple[str, int], Client] = {}
        self._process = psutil.Process()
        self._scheduler_incarnation = 0
        self._reports: deque[ServiceReport] = deque()
        self._reporter: asyncio.Task[None] | None = None
        self.drain_s = DRAIN_S
        self._broken: BaseException | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self.progress: Callable[[], int] = lambda: 0
        """What the heartbeat tells of the working thread, which alone advances it."""
        self.mailbox.handle(Ping, self._ping)
        self.mailbox.handle(messages.GetLog, self._log_page)

    # ---- to override

    async def start(self) -> None:
        """Do what must be done before READY (load a model, open a journal).

        Raises RpcError(bad_request) for a model, a function or a setting that no later start could use either.
        """

    async def serve(self) -> None:
        """Work until done; returning ends the service well. The default waits for a stop."""
        await self.stopping.wait()

    async def drain(self) -> None:
        """Finish or hand back what is under way; bounded by `drain_s`."""

    def heartbeat(self) -> messages.Heartbeat:
        """What to tell the scheduler each second; extend with `msgspec.structs.replace`."""
        return messages.Heartbeat(
            service=self.NAME,
            instance=self.instance,
            incarnation=self.incarnation,
            state=self.state,
            rss_bytes=self._process.memory_info().rss,
            progress=self.progress(),
        )

    def registration(self) -> messages.Register:
        """How to announce this life at the scheduler."""
        return messages.Register(
            service=self.NAME,
            instance=self.instance,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=host_names.gethostname(),
            endpoint=self.endpoint,
            host_id=self.run.host_id,
        )

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        """The scheduler has given these leases to others; stop working on them."""

    def on_newer_weights(self, ref: messages.WeightsRef) -> None:
        """The version that this engine holds is not the newest any more."""

    # ---- for services

    def client(self, service: str, instance: int = 0) -> Client:
        """The (cached) client of another service's mailbox, wherever that is."""
        key = (service, instance)
        if key not in self._clients:
            name = service_name(service, instance)
            if service == "scheduler":
                endpoint = self.run.scheduler or self.run.endpoint(service, instance)
            else:
                endpoint = "" if self._directory is not None else self.run.endpoint(service, instance)
            client = Client(self.context, endpoint, name, self.incarnation, keys=self._keys)
            if self._directory is not None and not endpoint:
                self._directory.follow(service, instance, client)
            self._clients[key] = client
        return self._clients[key]

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else until the end of this life; its failure is the service's."""
        self._helpers.append(asyncio.create_task(work))
        self._helpers[-1].add_done_callback(self._helper_ended)

    async def resolve(self, service: str, instance: int) -> messages.Resolved:
        """What an instance registered. Raises RpcError: missing, or the scheduler does not answer."""
        request = messages.Resolve(service=service, instance=instance)
        return await self.scheduler.call(request, messages.Resolved, deadline_s=CALL_S)

    @property
    def scheduler(self) -> Client:
        return self.client("scheduler")

    @property
    def supervised(self) -> bool:
        """Whether a launcher started this process, hears of its states and can kill it."""
        return bool(self._supervisor)

    def ends_after(self, what: str) -> None:
        """Tell the supervisor what the end of this life waits for, such as `saving step 19`."""
        self.cause = what
        self._enter(State.DRAINING)

    # ---- life-cycle

    async def run_until_stopped(self) -> int:
        """Live from STARTING to STOPPED or FAILED; returns the exit status. Leaves no socket behind."""
        self.loop = asyncio.get_running_loop()
        try:
            self.endpoint = self.bind()
            self._reach_other_hosts()
            self.telemetry.connect(self.client("monitor"))
            refusals = report_refusals(self.mailbox, self._gate, self.telemetry, HEARTBEAT_S)
            self._helpers.append(asyncio.create_task(refusals))
            self._report()
            if self.HEARTBEATS:
                self.keep(self._heartbeats())
            try:
                await self._until_stopping(self.start())
            except RpcError as error:
                if error.code == ErrorCode.BAD_REQUEST:
                    self.exit_status = UNUSABLE_STATUS
                raise
            if not self.stopping.is_set():
                # What was loaded by now stays, modules or a million tasks; a full collection would walk through it
                # each time (a store's in 0.03 s, while it sends nothing).
                gc.collect()
                gc.freeze()
                self._enter(State.READY)
                await self._until_stopping(self.serve())
            if self._broken is not None:
                raise self._broken
            if self.state != State.DRAINING:
                self._enter(State.DRAINING)
            async with asyncio.timeout(self.drain_s):
                await self.drain()
            self.cause = ""
            self._enter(State.STOPPED)
        except Exception as error:
            # one line for people; the log holds the trace
            self.cause = str(error) if isinstance(error, RpcError) else f"{type(error).__name__}: {error}"
            self.log.error("service failed", exc_info=error)
            self._enter(State.FAILED)
        finally:
            for task in self._helpers:
                task.cancel()
            await asyncio.gather(*self._helpers, return_exceptions=True)
            await self._flush_reports()
            await self.close()
        return 0 if self.state == State.STOPPED else self.exit_status

    def bind(self) -> str:
        """Open the mailbox. The scheduler overrides this to commit once a burst."""
        return self.mailbox.bind(self.context, self.run.endpoint(self.NAME, self.instance))

    def open_door(self, gate: Gate) -> str:
        """Open the mailbox to other hosts at `listen`; returns the endpoint. Who else listens overrides this."""
        return self.mailbox.bind(self.context, self.listen, gate=gate)

    def _reach_other_hosts(self) -> None:
        """Does nothing for a service that neither listens on tcp nor has joined a run of another host."""
        if not self.listen and not self.run.scheduler:
            return
        if self.listen:
            check_listen(self.listen)
        self._keys = keys.load(self.run.keys, Role.SERVICE)
        self._directory = Directory(self._find)
        if self.listen:
            self._gate = Gate(self.context, self._keys)
            self.endpoint = self.open_door(self._gate)
            self.log.info("listens", endpoint=self.endpoint)

    async def _find(self, service: str, instance: int) -> str:
        known = await self.resolve(service, instance)
        if known.host_id == self.run.host_id:
            return self.run.endpoint(service, instance)
        if not is_tcp(known.endpoint):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{service_name(service, instance)} answers on its own host only; start it with --listen tcp://ADDRESS:0",
            )
        return known.endpoint

    async def close(self) -> None:
        """Close every socket; the mailbox removes its file. A socket that a service forgot cannot hold this up."""
        if self._directory is not None:
            await self._directory.close()
        await self.mailbox.close()
        if self._gate is not None:
            self._gate.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        await asyncio.get_running_loop().run_in_executor(None, self.context.destroy, LINGER_MS)

    def request_stop(self) -> None:
        """Begin to drain (SIGTERM does this). Loop thread only."""
        self.stopping.set()

    async def _until_stopping(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _enter(self, state: str) -> None:
        self.state = state
        self.log.info("state", state=state, cause=self.cause)
        self._report()

    def _report(self) -> None:
        self.telemetry.emit("service", {"state": self.state, "cause": self.cause})
        if not self._supervisor:
            return
        self._reports.append(
            ServiceReport(
                service=self.NAME,
                instance=self.instance,
                incarnation=self.incarnation,
                pid=os.getpid(),
                state=self.state,
                cause=self.cause,
                endpoint=self.endpoint,
            )
        )
        if self._reporter is None or self._reporter.done():
            self._reporter = asyncio.create_task(self._send_reports())

    async def _send_reports(self) -> None:
        """One after the other, so that the supervisor sees states in the order of this life."""
        key = ("supervisor", 0)
        if key not in self._clients:
            self._clients[key] = Client(self.context, self._supervisor, "supervisor", self.incarnation)
        while self._reports:
            try:
                await self._clients[key].call(self._reports[0], messages.Ack, deadline_s=CALL_S)
            except (RpcError, WireError) as error:
                self.log.warning("supervisor did not take the report", error=str(error))
            self._reports.popleft()

    async def _flush_reports(self) -> None:
        if self._reporter is not None:
            await asyncio.wait({self._reporter}, timeout=LAST_REPORTS_S)
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        """Without its heartbeats (or what else it keeps) a service would be given up in silence: it fails aloud."""
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
            self.stopping.set()

    async def _heartbeats(self) -> None:
        registered = False
        while True:
            try:
                if not registered:
                    answer = await self.scheduler.call(self.registration(), messages.Registered, deadline_s=CALL_S)
                    self._scheduler_incarnation = answer.scheduler_incarnation
                    registered = True
                beat = await self.scheduler.call(self.heartbeat(), messages.HeartbeatAck, deadline_s=CALL_S)
                registered = beat.registered and beat.scheduler_incarnation == self._scheduler_incarnation
                if beat.lost_leases:
                    self.on_leases_lost(list(beat.lost_leases))
                if beat.weights is not None:
                    self.on_newer_weights(beat.weights)
                pause_s = HEARTBEAT_S if registered else REGISTER_AGAIN_S
            except (RpcError, WireError) as error:
                self.log.warning("scheduler not reached", error=str(error))
                pause_s = HEARTBEAT_S
            await asyncio.sleep(pause_s)

    def _ping(self, _: Ping, call: Call) -> Pong:
        return Pong(service=self.NAME, instance=self.instance, incarnation=self.incarnation, state=self.state)

    def _log_page(self, request: messages.GetLog, _: Call) -> messages.LogLines:
        """For the supervisor, which cannot read it when this service has joined from another host."""
        if (request.service, request.instance) != (self.NAME, self.instance):
            name = service_name(request.service, request.instance)
            raise RpcError(messages.ErrorCode.BAD_REQUEST, f"{self.name} has no log of {name}")
        lines, position = page(self.run.log_file(self.NAME, self.instance), request.lines, request.position)
        return messages.LogLines(lines=lines, position=position)


def install_signals(service: Service, loop: asyncio.AbstractEventLoop, *, supervised: bool) -> None:
    """SIGTERM drains. SIGINT too when started by hand; under a supervisor Ctrl-C is the supervisor's business."""
    loop.add_signal_handler(signal.SIGTERM, service.request_stop)
    if supervised:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGINT, service.request_stop)
