"""The life of a service: STARTING once its mailbox is open, READY, DRAINING, then STOPPED or FAILED.

A service sends heartbeats throughout. Heavy work runs on its own threads, not on the loop's thread, so that the mailbox
and the heartbeats keep going. A hung worker thread is noticed because its lease makes no progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket as host_names
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from enum import StrEnum
from typing import Any, ClassVar, Final, final

import psutil
import structlog
import zmq

from proto import messages
from proto.errors import WireError
from proto.ids import new_incarnation
from proto.messages import ErrorCode, GetWaits, Ping, Pong, ServiceReport, WaitRow, Waits
from shared.actor.logging import log_page
from shared.actor.telemetry import ResourceMeter, TelemetrySender, report_refusals
from shared.rpc.client import Client, Directory
from shared.rpc.errors import RpcError, is_certain
from shared.rpc.mailbox import Call, Mailbox
from shared.rpc.transport import LINGER_MS
from shared.rundir import RunDir, service_name
from shared.security import keys
from shared.security.curve import check_listen, is_tcp
from shared.security.keys import Keyring
from shared.security.roles import Role
from shared.security.zap import Gate
from shared.unusable import Unusable

HEARTBEAT_S = 1.0
DRAIN_S = 10.0
CALL_S = 10.0
REGISTER_AGAIN_S = 0.05
"""Seconds between a heartbeat that a restarted scheduler did not recognise and the new registration."""
LAST_REPORTS_S = 1.0
FAILED_STATUS = 1
PEER_LOST_STATUS = os.EX_TEMPFAIL
"""Exit status (75) of a process that exits because a process on which it depends is gone."""
UNUSABLE_STATUS = os.EX_CONFIG
"""Exit status (78) of a process for which a restart would not help, because it met a `BadInput` that `is_certain`."""


class ProcessState(StrEnum):
    """The states of a process. Services report the states from STARTING to FAILED; only the supervisor knows the
    others."""

    WAITING = "WAITING"
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    BACKOFF = "BACKOFF"
    DRAINED = "DRAINED"
    """The operator stopped the process (`ctl drain`). It is not restarted automatically."""


class Service:
    """Base of every actor. Override `start`, `serve` and `drain`; add handlers to `self.mailbox` in `__init__`.

    A subclass builds its parts in `__init__`, which may raise BadInput, and opens them in `start`. Nothing is set to
    None first and filled in later; what must be closed at the end is added to `closing` when it is opened.

    A subclass replaces nothing else by accident: a method that is not meant to be overridden is `final`, and Python
    keeps names that begin with two underscores apart from those of subclasses.

    An actor runs in a process through `shared.actor.process.run_process`, or on a thread in tests. All methods belong
    to one event loop; other threads call them with `asyncio.run_coroutine_threadsafe(..., self.loop)`.
    """

    NAME: ClassVar[str] = ""
    HEARTBEATS: ClassVar[bool] = True
    """Whether the service registers with the scheduler and sends heartbeats, as all services but the scheduler do."""

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        """`supervisor` is the endpoint to which states are reported, empty for a service started by hand."""
        self.run: Final = run
        self.instance: Final = instance
        self.incarnation: Final = new_incarnation()
        self.state = ProcessState.STARTING
        self.cause = ""
        self.exit_status = FAILED_STATUS
        """Exit status of the process if this life ends as FAILED."""
        self.name: Final = service_name(self.NAME, instance)
        self.mailbox: Final = Mailbox(self.name, self.incarnation)
        self.telemetry: Final = TelemetrySender(self.NAME, instance, self.incarnation)
        self.log: Final = structlog.get_logger(self.NAME)
        self.context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context(io_threads=1)
        self.endpoint = ""
        self.stopping: Final = asyncio.Event()
        self.closing: Final = AsyncExitStack()
        """What to close at the end of this life, last opened first, before the sockets. `start` adds to it."""
        self.loop: asyncio.AbstractEventLoop
        self.listen = ""
        """`tcp://ADDRESS:PORT` at which to answer other hosts. Set it before the service runs."""
        self.__keys: Keyring | None = None
        self.__gate: Gate | None = None
        self.__directory: Directory | None = None
        self.__supervisor = supervisor
        self.__clients: dict[tuple[str, int], Client] = {}
        self.__process = psutil.Process()
        self.__scheduler_incarnation = 0
        self.__reports: asyncio.Queue[ServiceReport] = asyncio.Queue()
        self.drain_s = DRAIN_S
        self.__failure: BaseException | None = None
        self.__background: list[asyncio.Task[None]] = []
        self.progress: Callable[[], int] = lambda: 0
        """Function that returns the progress for heartbeats. Only the worker thread advances it."""
        self.__progress = (0, -1.0)
        """The last progress noted, and the loop time at which it advanced, or -1."""
        self.__entered_at = -1.0
        """Loop time at which the current state began."""
        self.mailbox.handle(Ping, self.__ping)
        self.mailbox.handle(GetWaits, self.__waits)
        self.mailbox.handle(messages.GetLog, self.__log_page)

    # ---- to override

    async def start(self) -> None:
        """Prepare to become READY, for example by loading a model or opening a journal.

        Raises BadInput for a model, function or setting that would fail at every later start, too.
        """

    async def serve(self) -> None:
        """Work until done. Returning ends the service as STOPPED. By default, wait until the service is asked to
        stop."""
        await self.stopping.wait()

    async def drain(self) -> None:
        """Finish or hand back the work in progress within `drain_s` seconds."""

    def heartbeat(self) -> messages.Heartbeat:
        """Return the next heartbeat for the scheduler. Extend it with `msgspec.structs.replace`."""
        return messages.Heartbeat(
            service=self.NAME,
            instance=self.instance,
            incarnation=self.incarnation,
            state=self.state,
            rss_bytes=self.__process.memory_info().rss,
            progress=self.progress(),
        )

    def registration(self) -> messages.Register:
        """Return the message that registers this life with the scheduler."""
        return messages.Register(
            service=self.NAME,
            instance=self.instance,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=host_names.gethostname(),
            endpoint=self.endpoint,
            host_id=self.run.host_id,
        )

    async def open_waits(self) -> list[WaitRow]:
        """Return a row for each thing that this service is waiting for, except its requests to other processes. This
        must be quick."""
        return []

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        """Stop working on these leases, which the scheduler has withdrawn."""

    def on_newer_weights(self, ref: messages.WeightsRef) -> None:
        """Record that `ref` is newer than the version that this engine holds."""

    def on_upstream(self, stores: list[str]) -> None:
        """Record the stores from which this store fetches weights, nearest first."""

    # ---- for services

    @final
    def client(self, service: str, instance: int = 0) -> Client:
        """Return the (cached) client of another service's mailbox, on any host."""
        key = (service, instance)
        if key not in self.__clients:
            name = service_name(service, instance)
            if service == "scheduler":
                endpoint = self.run.scheduler or self.run.endpoint(service, instance)
            else:
                endpoint = "" if self.__directory is not None else self.run.endpoint(service, instance)
            client = Client(self.context, endpoint, name, self.incarnation, keys=self.__keys)
            if self.__directory is not None and not endpoint:
                self.__directory.follow(service, instance, client)
            self.__clients[key] = client
        return self.__clients[key]

    @final
    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background until the end of this life. If it fails, the service fails."""
        self.__background.append(asyncio.create_task(work))
        self.__background[-1].add_done_callback(self.__on_background_end)

    async def resolve(self, service: str, instance: int) -> messages.Resolved:
        """Return the registration of an instance. Raises RpcError if it is missing or the scheduler does not answer."""
        request = messages.Resolve(service=service, instance=instance)
        return await self.scheduler.call(request, messages.Resolved, deadline_s=CALL_S)

    @final
    @property
    def scheduler(self) -> Client:
        return self.client("scheduler")

    @final
    @property
    def supervised(self) -> bool:
        """Whether a launcher started this process, receives its states and can kill it."""
        return bool(self.__supervisor)

    @final
    def ends_after(self, what: str) -> None:
        """Enter DRAINING and tell the supervisor what must finish before the process exits, e.g. `saving step 19`."""
        self.cause = what
        self.__enter(ProcessState.DRAINING)

    # ---- life-cycle

    @final
    async def run_until_stopped(self) -> int:
        """Run from STARTING to STOPPED or FAILED, close all sockets and return the exit status."""
        self.loop = asyncio.get_running_loop()
        self.__entered_at = self.loop.time()
        reporter = asyncio.create_task(self.__send_reports())
        try:
            self.endpoint = self.bind()
            self.__reach_other_hosts()
            self.telemetry.connect(self.client("monitor"))
            refusals = report_refusals(self.mailbox, self.__gate, self.telemetry, HEARTBEAT_S)
            self.__background += [asyncio.create_task(refusals), asyncio.create_task(self.__report_resources())]
            self.__report()
            if self.HEARTBEATS:
                self.keep(self.__heartbeats())
            await self.__until_stopping(self.start())
            if not self.stopping.is_set():
                # Objects loaded by now, such as modules and tasks, stay alive. Once they are frozen, full collections
                # do not traverse them; otherwise, each one would keep a store from sending anything for 0.03 s.
                gc.collect()
                gc.freeze()
                self.__enter(ProcessState.READY)
                await self.__until_stopping(self.serve())
            if self.__failure is not None:
                raise self.__failure
            if self.state != ProcessState.DRAINING:
                self.__enter(ProcessState.DRAINING)
            async with asyncio.timeout(self.drain_s):
                await self.drain()
            self.cause = ""
            self.__enter(ProcessState.STOPPED)
        except Exception as error:
            # The cause is one line; the log contains the traceback.
            text = str(error) if isinstance(error, RpcError | Unusable) else f"{type(error).__name__}: {error}"
            self.cause = "; ".join(text.splitlines())
            if is_certain(error):
                self.exit_status = UNUSABLE_STATUS
            self.log.error("service failed", exc_info=error)
            self.__enter(ProcessState.FAILED)
        finally:
            for task in self.__background:
                task.cancel()
            await asyncio.gather(*self.__background, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.__reports.join(), LAST_REPORTS_S)
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
            self.telemetry.flush()
            await self.close()
        return 0 if self.state == ProcessState.STOPPED else self.exit_status

    def bind(self) -> str:
        """Open the mailbox. The scheduler overrides this to commit once per burst."""
        return self.mailbox.bind(self.context, self.run.endpoint(self.NAME, self.instance))

    def open_door(self, gate: Gate) -> str:
        """Open the mailbox to other hosts at `listen` and return the endpoint. Override this to open other sockets."""
        return self.mailbox.bind(self.context, self.listen, gate=gate)

    def __reach_other_hosts(self) -> None:
        """Load the keys, and open the mailbox on tcp if `listen` is set. On the host that started the run, do nothing
        if `listen` is not set."""
        if not self.listen and not self.run.scheduler:
            return
        if self.listen:
            check_listen(self.listen)
        self.__keys = keys.load(self.run.keys, Role.SERVICE)
        self.__directory = Directory(self.__find_endpoint)
        if self.listen:
            self.__gate = Gate(self.context, self.__keys)
            self.endpoint = self.open_door(self.__gate)
            self.log.info("listens", endpoint=self.endpoint)

    async def __find_endpoint(self, service: str, instance: int) -> str:
        registered = await self.resolve(service, instance)
        if registered.host_id == self.run.host_id:
            return self.run.endpoint(service, instance)
        if not is_tcp(registered.endpoint):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{service_name(service, instance)} answers only on its own host; start it with --listen tcp://ADDRESS:0",
            )
        return registered.endpoint

    async def close(self) -> None:
        """Close what is in `closing`, then all sockets; the mailbox removes its file.

        Sockets left open delay this by at most LINGER_MS.
        """
        await self.closing.aclose()
        if self.__directory is not None:
            await self.__directory.close()
        await self.mailbox.close()
        if self.__gate is not None:
            self.__gate.close()
        for client in self.__clients.values():
            client.close()
        self.__clients.clear()
        await asyncio.get_running_loop().run_in_executor(None, self.context.destroy, LINGER_MS)

    def request_stop(self) -> None:
        """Begin to drain, as on SIGTERM. Call it on the loop's thread."""
        self.stopping.set()

    async def __until_stopping(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def __enter(self, state: ProcessState) -> None:
        self.state = state
        self.__entered_at = self.loop.time()
        self.log.info("state", state=state, cause=self.cause)
        self.__report()

    def __report(self) -> None:
        self.telemetry.emit("service", {"state": self.state, "cause": self.cause})
        if not self.__supervisor:
            return
        self.__reports.put_nowait(
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

    async def __send_reports(self) -> None:
        """Send the reports one by one, so that the supervisor receives the states in order."""
        while True:
            report = await self.__reports.get()
            key = ("supervisor", 0)
            if key not in self.__clients:
                self.__clients[key] = Client(self.context, self.__supervisor, "supervisor", self.incarnation)
            try:
                await self.__clients[key].call(report, messages.Ack, deadline_s=CALL_S)
            except (RpcError, WireError) as error:
                self.log.warning("the supervisor did not accept the report", error=str(error))
            self.__reports.task_done()

    def __on_background_end(self, task: asyncio.Task[None]) -> None:
        """Fail the service when a background task fails: without heartbeats, for example, it would count as lost."""
        if not task.cancelled() and task.exception() is not None:
            self.__failure = task.exception()
            self.stopping.set()

    async def __heartbeats(self) -> None:
        registered, every_s = False, HEARTBEAT_S
        while True:
            try:
                if not registered:
                    answer = await self.scheduler.call(self.registration(), messages.Registered, deadline_s=CALL_S)
                    self.__scheduler_incarnation = answer.scheduler_incarnation
                    registered, every_s = True, answer.heartbeat_s
                self.__note_progress()
                beat = await self.scheduler.call(self.heartbeat(), messages.HeartbeatAck, deadline_s=CALL_S)
                registered = beat.registered and beat.scheduler_incarnation == self.__scheduler_incarnation
                if beat.lost_leases:
                    self.on_leases_lost(list(beat.lost_leases))
                if beat.weights is not None:
                    self.on_newer_weights(beat.weights)
                self.on_upstream(list(beat.upstream))
                pause_s = every_s if registered else REGISTER_AGAIN_S
            except (RpcError, WireError) as error:
                self.log.warning("scheduler does not answer", error=str(error))
                pause_s = HEARTBEAT_S
            await asyncio.sleep(pause_s)

    async def __report_resources(self) -> None:
        """Emit this process's resource usage every second until cancelled."""
        meter = ResourceMeter()
        life: dict[str, float | str] = {
            "host": host_names.gethostname(),
            "pid": float(os.getpid()),
            "incarnation": f"{self.incarnation:016x}",
        }
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.__note_progress()
            self.telemetry.emit("process", {**life, **meter.read(), "progress_age_s": self.__progress_age_s()})

    def __ping(self, _: Ping, call: Call) -> Pong:
        return Pong(
            service=self.NAME, instance=self.instance, incarnation=self.incarnation, state=self.state, at=time.time()
        )

    def __note_progress(self) -> None:
        if self.progress() != self.__progress[0]:
            self.__progress = (self.progress(), self.loop.time())

    def __progress_age_s(self) -> float:
        """Return the number of seconds since progress was last made, or -1 if none has been made yet."""
        return self.loop.time() - self.__progress[1] if self.__progress[1] >= 0 else -1.0

    async def __waits(self, _: GetWaits, call: Call) -> Waits:
        self.__note_progress()
        requests = [row for client in list(self.__clients.values()) for row in client.waits()]
        now = self.loop.time()
        return Waits(
            incarnation=self.incarnation,
            state=self.state,
            state_s=now - self.__entered_at,
            cause=self.cause,
            waits=[*await self.open_waits(), *requests],
            progress_s=self.__progress_age_s(),
        )

    def __log_page(self, request: messages.GetLog, _: Call) -> messages.LogLines:
        """Answer the supervisor, which cannot read the log file of a service on another host."""
        if (request.service, request.instance) != (self.NAME, self.instance):
            name = service_name(request.service, request.instance)
            raise RpcError(messages.ErrorCode.BAD_REQUEST, f"{self.name} has no log of {name}")
        lines, position = log_page(self.run.log_file(self.NAME, self.instance), request.lines, request.position)
        return messages.LogLines(lines=lines, position=position)


def install_signals(service: Service, loop: asyncio.AbstractEventLoop, *, supervised: bool) -> None:
    """Drain on SIGTERM, and on SIGINT if the service was started by hand. A supervised service ignores SIGINT, which
    the supervisor handles. A signal that was inherited as ignored (`nohup`, `&` in a script) stays ignored."""
    loop.add_signal_handler(signal.SIGTERM, service.request_stop)
    if supervised:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, service.request_stop)
