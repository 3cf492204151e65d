"""Carries out the decisions of the supervisor's state machine: starts and watches processes, and answers the operator.

It decides nothing itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, assert_never

import structlog
import zmq

from launch.placement.desk import KILL_S, HostDesk
from launch.spares.processes import SpareNotice, SpareProcesses
from launch.spares.state import SpareKind
from launch.supervisor.door import SupervisorDoor
from launch.supervisor.events import (
    Died,
    DrainAsked,
    Effect,
    Event,
    Exited,
    GivenUp,
    HostsEnded,
    HostUnable,
    Kill,
    KillAsked,
    KillOrdered,
    Reported,
    RestartAsked,
    Retire,
    RollingRestartAsked,
    RunEnded,
    Silent,
    SpareSettled,
    Spawn,
    Spawned,
    StartAsked,
    StopAsked,
    Terminate,
    TimePassed,
)
from launch.supervisor.joined import log_of_joined
from launch.supervisor.plan import (
    DRIVER,
    EVERYTHING,
    LEASING,
    SUPERVISOR,
    Key,
    Resized,
    module_of,
    rolling_order,
)
from launch.supervisor.programs import Child, Programs
from launch.supervisor.stacks import log_stacks
from launch.supervisor.state import RunLifecycle, RunPhase
from launch.supervisor.views import Views
from launch.supervisor.waits import ProcessWaits
from launch.supervisor.watch import MailboxWatch
from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    DrainService,
    ErrorCode,
    GetLog,
    GetStatus,
    KillInstance,
    LogLines,
    ProcessRow,
    RestartService,
    ScaleService,
    ServiceReport,
    Status,
    StopRun,
)
from proto.registry import Request
from shared.actor.process import STACK_SIGNAL
from shared.actor.service import ProcessState
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Answer, Call, Mailbox
from shared.rundir import RunDir, service_name
from shared.security.access import Access
from shared.topology import load

COMPLETE_CALL_S = 5.0
RETIRE_CALL_S = 5.0
FOREIGN_S = 10.0
"""Seconds of silence after which a registered process that the supervisor did not start counts as gone."""
CANNOT_START = 127
EVENTS = Died | GivenUp | Spawned | Reported | SpareNotice
"""The events passed to `on_event`."""


class Supervisor:
    """Runs the processes of `plan` until the run is done, stopped or failed. For the main thread only."""

    def __init__(
        self,
        run: RunDir,
        plan: Sequence[Key],
        *,
        threads: Mapping[Key, int],
        start_limit_s: float,
        gpus: Mapping[Key, str] | None = None,
        listen: Mapping[Key, str] | None = None,
        on_event: Callable[[EVENTS], None],
        lock: int | None = None,
        save_limit_s: float = 0.0,
        command: Callable[[str], Sequence[str]] | None = None,
        spares: Sequence[SpareKind] = (),
        ranks: Mapping[str, int] | None = None,
        resize: Callable[[str, int], Resized] | None = None,
        hosts: HostDesk | None = None,
        access: Access | None = None,
    ) -> None:
        """`threads` gives the number of CPU threads of each process (default 1), and `gpus` its CUDA_VISIBLE_DEVICES.
        A process that is not READY within `start_limit_s` seconds is killed and started again. If the run spans several
        hosts, `listen` gives each process's endpoint for other hosts, including the supervisor's own. `lock` is the
        descriptor of the lock on the run directory, which the guard inherits. `save_limit_s` is the maximum time, in
        seconds, that the trainer may take to save a checkpoint at the end. `command` returns the program of a service;
        by default, a service runs its module. `spares` are the spare processes to keep; services are forked from them.

        `ranks` is the number of processes that together hold one model, by service (default 1). `resize` checks that a
        service can have a given number of instances and returns what they need, or raises RpcError; if it is None,
        nothing can be scaled. `hosts` manages the other hosts of the run. `access` provides the run's endpoints and
        keys to a supervisor on another host, which runs a part of the run.
        """
        self._run = run
        self._kinds = list(spares)
        forked = {service for kind in spares for service in kind.services}
        self.state = RunLifecycle(plan, save_limit_s, start_limit_s=start_limit_s, hosts=hosts is not None, held=forked)
        self._programs = Programs(
            run, threads=threads, gpus=gpus or {}, lock=lock, drain_limit_s=self.state.drain_limit_s
        )
        self._start_limit_s = start_limit_s
        self._listen = dict(listen or {})
        self._on_event = on_event
        self._ranks = dict(ranks or {})
        self._resize = resize
        self._hosts = hosts
        self._access = access
        self._command = command or (lambda service: [sys.executable, "-m", module_of(service)])
        self._spares: SpareProcesses
        self._views: Views
        self._children: dict[Key, Child] = {}
        self._ended: asyncio.Future[RunEnded]
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._incarnation = new_incarnation()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._mailbox = Mailbox(SUPERVISOR, self._incarnation)
        self._endpoint = ""
        self._outcome_written = False
        self._ended_lives: set[tuple[Key, int]] = set()
        """The processes that ran here and have ended, with their ids."""
        self._dying: dict[int, list[Call]] = {}
        """The calls to answer once a process is dead, by its pid."""
        self._scheduler: Client | None = None
        self._waits = ProcessWaits()
        self._door: SupervisorDoor | None = None
        self._log = structlog.get_logger(SUPERVISOR)

    async def run(self) -> RunEnded:
        """Start everything, keep it running and return how the run ended. Leaves no process behind, even on errors."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._spares = SpareProcesses(
            self._run,
            self._programs,
            self._kinds,
            start_limit_s=self._start_limit_s,
            on_settled=lambda services: self._feed(SpareSettled(services)),
            on_notice=self._on_event,
        )
        self._mailbox.handle(ServiceReport, self._on_report)
        self._mailbox.handle(RestartService, self._on_restart)
        self._mailbox.handle(DrainService, self._on_drain)
        self._mailbox.handle(ScaleService, self._on_scale)
        self._mailbox.handle(KillInstance, self._on_kill)
        self._mailbox.handle(StopRun, self._on_stop)
        self._views = Views(
            self._run,
            self.state,
            self._waits,
            self._incarnation,
            spares=self._spares.rows,
            joined_log=self._joined_log,
            hosts=self._hosts.book if self._hosts is not None else None,
        )
        self._views.serve(self._mailbox)
        watch = MailboxWatch(
            self._run,
            self._context,
            self._incarnation,
            ready=self._ready_processes,
            on_silent=self._on_silent,
            on_unreachable=self._on_unreachable,
        )
        try:
            self._endpoint = self._mailbox.bind(self._context, self._run.endpoint(SUPERVISOR, 0))
            self._door = SupervisorDoor(self._run, self._context, self._mailbox, self._incarnation, self._access)
            self._door.open(self._listen.get((SUPERVISOR, 0), ""))
            if self._hosts is not None:
                self._hosts.on_unable = self._fail
                self._hosts.open(
                    self._mailbox, self._context, self._incarnation, self._door.keys, self._scheduler_client
                )
            self._run.outcome.unlink(missing_ok=True)
            self._programs.start_guard()
            self._feed(TimePassed())
            self._spares.fill()
            self._background(watch.watch())
            return await self._ended
        finally:
            await watch.close()
            await self._close()

    def stop(self, cause: str) -> None:
        """Drain everything and end the run."""
        self._feed(StopAsked(cause))

    def add(self, key: Key, threads: int, gpus: str) -> None:
        """Run one more process, with `threads` CPU threads and the GPUs `gpus` (CUDA_VISIBLE_DEVICES)."""
        self._programs.place(key, threads, gpus)
        if (SUPERVISOR, 0) in self._listen:
            self._listen[key] = self._listen[SUPERVISOR, 0]  # each picks a port of its own
        self._feed(StartAsked([key]))

    def drain(self, keys: Sequence[Key]) -> None:
        """Have processes finish their leases and exit. They are not restarted."""
        self._feed(DrainAsked(keys))

    def kill(self, cause: str = "killed") -> None:
        """Kill everything at once."""
        self._feed(KillAsked(cause))

    @property
    def draining(self) -> bool:
        return self.state.phase in (RunPhase.DRAINING, RunPhase.ENDED)

    @property
    def door(self) -> str:
        """Endpoint at which the supervisor answers other hosts, or an empty string."""
        return self._door.endpoint if self._door is not None else ""

    def rows(self) -> list[ProcessRow]:
        """Return the processes on this host."""
        return self._views.rows()

    def rows_of_hosts(self) -> list[ProcessRow]:
        """Return the processes on the other hosts."""
        return self._hosts.book.rows() if self._hosts is not None else []

    @property
    def all_ready(self) -> bool:
        """Whether every process here has been READY, and so are the processes that other hosts need to run."""
        away = self._hosts is None or self._hosts.book.all_ready
        return away and self.state.phase == RunPhase.RUNNING

    def _fail(self, cause: str) -> None:
        self._feed(HostUnable(cause))

    async def scheduler_status(self, deadline_s: float) -> Status | None:
        """Return the status of the run, or None if the scheduler does not answer."""
        try:
            return await self._scheduler_client().call(GetStatus(), Status, deadline_s=deadline_s)
        except RpcError:
            return None

    def _scheduler_client(self) -> Client:
        if self._scheduler is None:
            away = self._access
            endpoint = self._run.endpoint("scheduler", 0) if away is None else away.endpoints["scheduler"]
            keys = None if away is None else away.keys
            self._scheduler = Client(self._context, endpoint, "scheduler/0", self._incarnation, keys=keys)
        return self._scheduler

    # ---- events and effects

    def _feed(self, event: Event) -> None:
        queue: list[Event] = [event]
        while queue:
            for effect in self.state.handle(queue.pop(0), self._loop.time()):
                answer = self._carry_out(effect)
                if answer is not None:
                    queue.append(answer)
        self._waits.note(self.state, self._loop.time())
        self._set_timer()
        if self.draining:
            self._spares.close()
            self._end_hosts()
            self._write_outcome()
        elif self.state.calm:
            self._spares.fill()

    def _end_hosts(self) -> None:
        """Stop the other hosts once the driver has ended. Until then, the driver may need what is on those hosts."""
        if self._hosts is None or self._hosts.book.ending or any(key[0] == DRIVER for key, _ in self.state.pids()):
            return
        self._hosts.end()
        self._background(self._hosts_ended(self._hosts))

    async def _hosts_ended(self, hosts: HostDesk) -> None:
        await hosts.ended()
        self._feed(HostsEnded())

    def _write_outcome(self) -> None:
        """Write the outcome of the run as soon as the run is ending, for services that report it."""
        if self._outcome_written or self._access is not None:
            return
        self._outcome_written = True
        outcome, cause = self.state.end
        try:
            partial = self._run.outcome.with_suffix(".partial")
            partial.write_text(json.dumps({"outcome": outcome.lower(), "cause": cause}))
            partial.replace(self._run.outcome)
        except OSError as error:
            self._log.warning("the outcome cannot be written", error=str(error))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.state.next_deadline()
        if deadline is not None and not self._ended.done():
            self._timer = self._loop.call_at(deadline, self._feed, TimePassed())

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Spawn(key):
                return self._spawn(key)
            case Terminate(key, pid):
                self._signal(key, pid, signal.SIGTERM)
            case Retire(key, pid):
                self._background(self._retire(key, pid))
            case Kill(key, pid, hung):
                self._log.warning("killed", name=service_name(*key), pid=pid)
                if hung:
                    self._background(self._kill_hung(key, pid))
                else:
                    self._signal(key, pid, signal.SIGKILL)
            case Died():
                self._log.warning("process died", name=service_name(*effect.key), cause=effect.cause)
                self._on_event(effect)
            case GivenUp():
                self._log.error("the run goes on without it", name=service_name(*effect.key), cause=effect.cause)
                self._on_event(effect)
            case RunEnded():
                self._log.info("ended", outcome=effect.outcome, cause=effect.cause)
                if not self._ended.done():
                    self._ended.set_result(effect)
            case _:
                assert_never(effect)
        return None

    def _command_of(self, key: Key) -> list[str]:
        service, instance = key
        command = [*self._command(service), "--run", str(self._run.path), "--instance", str(instance)]
        command += ["--supervisor", self._endpoint, "--parent", str(os.getpid())]
        return command + (["--listen", self._listen[key]] if key in self._listen else [])

    def _spawn(self, key: Key) -> Event:
        service, instance = key
        command = self._command_of(key)
        try:
            with (self._run.logs / f"{service}-{instance}.out").open("ab") as output:
                child = self._spares.fork(key, command, output) or self._programs.start(key, command, output)
        except OSError as error:
            self._log.error("cannot start", name=service_name(*key), error=str(error))
            return Exited(key, 0, CANNOT_START)
        self._children[key] = child
        self._loop.add_reader(child.descriptor, self._on_exit, key, child)
        self._log.info("started", name=service_name(*key), pid=child.pid)
        started = Spawned(key, child.pid)
        self._on_event(started)
        return started

    def _signal(self, key: Key, pid: int, number: int) -> None:
        child = self._children.get(key)
        if child is not None and child.pid == pid:
            child.signal(number)
            if number == signal.SIGTERM:
                child.signal(signal.SIGCONT)  # a stopped process cannot drain

    async def _kill_hung(self, key: Key, pid: int) -> None:
        cause = self.state.processes[key].cause
        await log_stacks(self._run, key, pid, cause, lambda: self._signal(key, pid, STACK_SIGNAL))
        self._signal(key, pid, signal.SIGKILL)

    def _on_exit(self, key: Key, child: Child) -> None:
        status, pid = self._programs.reap(child), child.pid
        if self._children.get(key) is child:
            del self._children[key]
        self._ended_lives.add((key, pid))
        self._log.info("exited", name=service_name(*key), pid=pid, status=status)
        for call in self._dying.pop(pid, []):
            call.reply(Ack())
        if key[0] == DRIVER and status == 0 and not self.draining:
            self._background(self._driver_exited(key, pid))
        else:
            self._feed(Exited(key, pid, status))

    async def _driver_exited(self, key: Key, pid: int) -> None:
        """Report the exit. A driver that drains after a SIGTERM from outside also exits with 0, so the run is complete
        only after its last step. An evaluation has no steps and exports nothing: it is complete once it has a row."""
        status = await self.scheduler_status(COMPLETE_CALL_S)
        complete = self._run.export.is_dir() and (status is None or status.step >= status.steps)
        if status is not None and status.steps == 0:
            complete = bool(status.last_row)
        self._feed(Exited(key, pid, 0, run_complete=complete))

    async def _retire(self, key: Key, pid: int) -> None:
        """Ask a service to finish its leases. If it does not answer, tell it to stop, so that it returns its leases."""
        name = service_name(*key)
        client = Client(self._context, self._run.endpoint(*key), name, self._incarnation)
        try:
            await client.call(DrainService(service=key[0], instance=key[1]), Ack, deadline_s=RETIRE_CALL_S)
        except RpcError as error:
            self._log.warning("does not finish its leases", name=name, error=str(error))
            self._signal(key, pid, signal.SIGTERM)
        finally:
            client.close()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ready_processes(self) -> Iterator[tuple[Key, int]]:
        if not self.draining:
            for key, process in self.state.processes.items():
                if process.state == ProcessState.READY:
                    yield key, process.pid

    def _on_silent(self, key: Key, pid: int, seconds: float) -> None:
        self._feed(Silent(key, pid, seconds))

    def _on_unreachable(self) -> None:
        self._fail(f"{self._run.sockets}, the folder of the run's sockets, was deleted; continue the run with --resume")

    # ---- the operator and the services

    def _on_report(self, report: ServiceReport, call: Call) -> Ack:
        key = (report.service, report.instance)
        try:
            state = ProcessState(report.state)
        except ValueError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{error}: use one of {', '.join(ProcessState)}") from None
        event = Reported(key, report.pid, report.incarnation, state, report.cause)
        self._feed(event)
        self._on_event(event)
        return Ack()

    def _on_restart(self, request: RestartService, call: Call) -> Answer | Awaitable[Answer]:
        self._refuse_at_end()
        if request.service == EVERYTHING:
            self._feed(RollingRestartAsked(rolling_order(self.state.processes, self._ranks)))
            return self._pass_on(request, self._away_keys())
        here, away = self._keys(request.service, request.instance)
        self._feed(RestartAsked(here))
        return self._pass_on(request, away)

    def _on_drain(self, request: DrainService, call: Call) -> Answer | Awaitable[Answer]:
        self._refuse_at_end()
        here, away = self._keys(request.service, request.instance)
        if request.service not in LEASING:
            text = f"{request.service} cannot be drained: it leases no tasks (only {', '.join(LEASING)} do); restart it"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        ranks = self._ranks.get(request.service, 1)
        if len(here + away) % ranks:
            name = service_name(request.service, request.instance)
            text = f"{name} holds one of {ranks} pieces of its model; drain {request.service} as a whole, or scale it"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        self._feed(DrainAsked(here))
        return self._pass_on(request, away)

    async def _on_scale(self, request: ScaleService, call: Call) -> Ack:
        self._refuse_at_end()
        if self._resize is None:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{request.service} cannot be scaled in this run")
        await self._refuse_foreign(request)
        resized = await self._loop.run_in_executor(None, self._resize, request.service, request.instances)
        self._refuse_at_end()
        if self._hosts is not None:
            self._hosts.book.plan(load(self._run.topology))
        here = [key for key in resized.keys if self._hosts is None or self._hosts.book.host_of(key) is None]
        for key in here:
            self._programs.place(key, resized.threads, resized.gpus[key])
            if resized.listen:
                self._listen[key] = resized.listen
        self._log.info("scaled", name=request.service, instances=request.instances)
        self._feed(StartAsked(here))
        above = [key for key in self.state.processes if key[0] == request.service and key not in here]
        self._feed(DrainAsked(above))
        if self._hosts is not None:
            drained = {(row.service, row.instance) for row in self.rows_of_hosts() if row.state == ProcessState.DRAINED}
            for service, instance in sorted(drained & {*resized.keys}):
                start = RestartService(service=service, instance=instance)
                await self._forward(self._hosts, start, [(service, instance)])
        return Ack()

    async def _refuse_foreign(self, request: ScaleService) -> None:
        """Raise RpcError(bad_request) if one of the instances was started by hand, perhaps on a joined host."""
        status = await self.scheduler_status(COMPLETE_CALL_S)
        for row in status.services if status is not None else ():
            ours = (row.service, row.instance) in {*self.state.processes, *self._away_keys()}
            if ours or row.service != request.service or row.heartbeat_age_s >= FOREIGN_S:
                continue
            if row.instance < request.instances:
                name = service_name(row.service, row.instance)
                why = f"{name} was started by hand on host {row.host}; stop it, or use {row.instance} or fewer"
                raise RpcError(ErrorCode.BAD_REQUEST, f"scale {row.service} to {request.instances} refused: {why}")

    def _keys(self, service: str, instance: int) -> tuple[list[Key], list[Key]]:
        """Return the processes of a service that run on this host, and those on the other hosts.

        `instance` selects one of them; -1 stands for all.
        Raises RpcError(bad_request) if there is no such process.
        """
        here = [key for key in self.state.processes if key[0] == service and instance in (-1, key[1])]
        away = [key for key in self._away_keys() if key[0] == service and instance in (-1, key[1])]
        if not here and not away:
            raise RpcError(ErrorCode.BAD_REQUEST, f"no service {service_name(service, instance)}")
        return here, away

    def _away_keys(self) -> list[Key]:
        return list(self._hosts.book.keys()) if self._hosts is not None else []

    def _pass_on(self, request: Request, keys: Sequence[Key]) -> Answer | Awaitable[Answer]:
        """Have the agents on the hosts that run `keys` carry out a request."""
        if self._hosts is None or not keys:
            return Ack()
        return self._forward(self._hosts, request, keys)

    async def _forward(self, hosts: HostDesk, request: Request, keys: Sequence[Key]) -> Ack:
        await asyncio.gather(*(hosts.forward(host, request) for host in hosts.hosts_of(keys)))
        return Ack()

    def _refuse_at_end(self) -> None:
        if self.draining:
            raise RpcError(ErrorCode.DRAINING, "the run is ending, so nothing is started, restarted or drained")

    def _on_kill(self, request: KillInstance, call: Call) -> Answer | Awaitable[Answer]:
        key = (request.service, request.instance)
        host = self._hosts.book.host_of(key) if self._hosts is not None else None
        if self._hosts is not None and host is not None:
            return self._hosts.forward(host, request, KILL_S)
        child = self._children.get(key)
        if child is None or child.pid != request.pid:
            if (key, request.pid) in self._ended_lives:
                return Ack()
            text = f"{service_name(*key)}: process {request.pid} was not started by this launcher and may be alive"
            raise RpcError(ErrorCode.MISSING, f"{text}; stop it where it runs")
        self._log.warning("to be killed", name=service_name(*key), cause=request.cause)
        self._dying.setdefault(request.pid, []).append(call)
        self._feed(KillOrdered(key, request.pid, request.cause))
        return DEFERRED

    def _on_stop(self, _: StopRun, call: Call) -> Ack:
        # deferred, so that the answer is sent before the mailbox closes
        self._loop.call_soon(self.stop, "stopped by the operator")
        return Ack()

    def _joined_log(self, request: GetLog) -> Awaitable[LogLines]:
        ring = self._door.keys if self._door is not None else None
        return log_of_joined(request, self._scheduler_client(), self._context, self._incarnation, ring)

    # ---- the end

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._spares.close()
        for child in self._children.values():  # some are left only after an exception in `run`
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait()
        if self._hosts is not None:
            await self._hosts.close()
        await self._mailbox.close()
        if self._door is not None:
            await self._door.close()
        if self._scheduler is not None:
            self._scheduler.close()
        await self._loop.run_in_executor(None, self._context.term)
        await self._programs.close_guard()
