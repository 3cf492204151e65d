"""Carries out the decisions of the supervisor's state machine (`launch.supervisor.state`). It makes none itself."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, assert_never

import structlog

from launch.placement.book import HostBook, Told
from launch.placement.desk import HostDesk, Refusals
from launch.processes.plan import DRIVER, SUPERVISOR, Key, Resources
from launch.processes.programs import Programs
from launch.spares.processes import SpareKind, SpareProcesses
from launch.supervisor import events as e
from launch.supervisor.events import RunOutcome
from launch.supervisor.requests import STATUS_CALL_S, OperatorRequests
from launch.supervisor.runner import MailboxWatch, Runner
from launch.supervisor.sockets import SupervisorSockets
from launch.supervisor.state import RunLifecycle, RunPhase
from launch.supervisor.views import Views
from proto.messages import Ack, ErrorCode, ServiceReport
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir, service_name
from shared.runfiles.last import as_lines
from shared.security.access import Access
from shared.view.services import process_rows

SOCKETS_DELETED = "the folder of the run's sockets, was deleted; continue the run with --resume"
EVENTS = e.Died | e.GivenUp | e.Spawned | e.Reported | Told
"""The events passed to `on_event`."""


class Supervisor:
    """Runs processes until the run is done, stopped or failed. For the main thread only."""

    def __init__(
        self,
        run: RunDir,
        processes: Mapping[Key, Resources],
        *,
        start_limit_s: float,
        on_event: Callable[[EVENTS], None],
        listen: str = "",
        lock: int | None = None,
        save_limit_s: float = 0.0,
        spares: Sequence[SpareKind] = (),
        ranks: Mapping[str, int] | None = None,
        hosts: HostBook | None = None,
        refusals: Refusals | None = None,
        access: Access | None = None,
    ) -> None:
        """`processes` are the processes to run, with what each is given. A process that is not READY within
        `start_limit_s` seconds is killed and started again. `listen` is the endpoint at which the supervisor answers
        other hosts. `lock` is the descriptor of the lock on the run directory, which the guard inherits. `save_limit_s`
        is the maximum time, in seconds, that the trainer may take to save a checkpoint at the end. `spares` are the
        spare processes to keep; services are forked from them. `ranks` is the number of processes that together hold
        one model, by service; without it, no service can be scaled.

        `hosts` are the other hosts of the run, and `refusals` returns why one of them cannot take part. `access`
        provides the run's endpoints and keys to a supervisor on another host, which runs a part of the run.
        """
        hosts = hosts or HostBook()
        self._run = run
        self._on_event = on_event
        self._listen = listen
        self._is_home = self._outcome_due = access is None

        def notice(text: str) -> None:
            on_event(Told(text))

        forked = {service for kind in spares for service in kind.services}
        self.state = RunLifecycle(
            list(processes), save_limit_s, start_limit_s=start_limit_s, hosts=bool(hosts.hosts), held=forked
        )
        self.sockets = SupervisorSockets(run, access)
        self.hosts = HostDesk(
            hosts,
            refusals,
            self.sockets.mailbox,
            lambda: self.sockets.announced("scheduler"),
            lambda name, endpoint: self.sockets.client(name, endpoint, self.sockets.keys),
            on_notice=notice,
            on_unable=lambda cause: self._feed(e.EndAsked(cause, RunOutcome.FAILED)),
        )
        self._programs = Programs(run, lock=lock, drain_limit_s=self.state.drain_limit_s)
        self._spares = SpareProcesses(
            run,
            self._programs,
            spares,
            start_limit_s=start_limit_s,
            on_settled=lambda services: self._feed(e.SpareSettled(services)),
            on_notice=notice,
        )
        self._runner = Runner(run, self.sockets, processes, self._programs, self._spares, on_exit=self._exited)
        self._requests = OperatorRequests(
            run, self.state, self.sockets, self._runner, self.hosts, ranks, feed=self._feed
        )
        self.views = Views(run, self.state, self.sockets, self._spares.rows, self.hosts.book)
        self._watch = MailboxWatch(
            run,
            self.sockets,
            ready=self._ready_processes,
            on_silent=lambda key, pid, cause: self._feed(e.KillOrdered(key, pid, cause)),
            on_unreachable=lambda: self._feed(e.EndAsked(f"{run.sockets}, {SOCKETS_DELETED}", RunOutcome.FAILED)),
        )
        self.sockets.mailbox.handle(ServiceReport, self._on_report)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[e.RunEnded] = asyncio.Queue()
        self._log = structlog.get_logger(SUPERVISOR)

    async def run(self) -> e.RunEnded:
        """Start everything, keep it running and return how the run ended. Leaves no process behind, even on errors."""
        try:
            self.sockets.open(self._listen)
            self.hosts.begin()
            for file in (self._run.outcome, self._run.last):
                file.unlink(missing_ok=True)
            self._programs.start_guard()
            self._feed(e.TimePassed())
            self._spares.fill()
            self._background(self._watch.watch())
            return await self._ended.get()
        finally:
            await self._close()

    def stop(self, cause: str) -> None:
        """Drain everything and end the run."""
        self._feed(e.EndAsked(cause))

    def add(self, key: Key, resources: Resources) -> None:
        """Run one more process."""
        self._runner.give(key, resources)
        self._feed(e.StartAsked([key]))

    def drain(self, keys: Sequence[Key]) -> None:
        """Have processes finish their leases and exit. They are not restarted."""
        self._feed(e.DrainAsked(keys))

    def kill(self, cause: str = "killed") -> None:
        """Kill everything at once."""
        self._feed(e.EndAsked(cause, at_once=True))

    @property
    def all_ready(self) -> bool:
        """Whether every process here has been READY, and so are the processes that other hosts need to run."""
        return self.hosts.book.all_ready and self.state.phase == RunPhase.RUNNING

    # ---- events and effects

    def _feed(self, event: e.Event) -> None:
        loop = asyncio.get_running_loop()
        queue = [event]
        while queue:
            for effect in self.state.handle(queue.pop(0), loop.time()):
                queue += self._carry_out(effect)
        self.views.note(loop.time())
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.state.next_deadline() if self.state.phase != RunPhase.ENDED else None
        self._timer = loop.call_at(deadline, self._feed, e.TimePassed()) if deadline is not None else None
        if self.state.ending:
            self._spares.close()
            self._end_hosts()
            self._write_outcome()
        elif self.state.calm:
            self._spares.fill()

    def _carry_out(self, effect: e.Effect) -> list[e.Event]:
        """Carry out an effect, and return the events that it causes at once."""
        match effect:
            case e.Spawn(key):
                outcome = self._runner.spawn(key)
                if isinstance(outcome, e.Spawned):
                    self._on_event(outcome)
                return [outcome]
            case e.Terminate(key, pid):
                self._runner.signal(key, pid, signal.SIGTERM)
            case e.RetireProcess(key, pid):
                self._background(self._runner.retire(key, pid))
            case e.Kill(key, pid, hung):
                self._log.warning("killed", name=service_name(*key), pid=pid)
                if hung:
                    self._background(self._runner.kill_hung(key, pid, self.state.processes[key].cause))
                else:
                    self._runner.signal(key, pid, signal.SIGKILL)
            case e.Died():
                self._log.warning("process died", name=service_name(*effect.key), cause=effect.cause)
                self._on_event(effect)
            case e.GivenUp():
                self._log.error("the run goes on without it", name=service_name(*effect.key), cause=effect.cause)
                self._on_event(effect)
            case e.RunEnded():
                self._log.info("ended", outcome=effect.outcome, cause=effect.cause)
                self._add_last()
                self._ended.put_nowait(effect)
            case _:
                assert_never(effect)
        return []

    def _end_hosts(self) -> None:
        """Stop the other hosts once the driver has ended. Until then, the driver may need what is on those hosts."""
        book = self.hosts.book
        if not book.hosts or book.ending or any(key[0] == DRIVER for key, _ in self.state.pids()):
            return
        self.hosts.end()
        self._background(self._hosts_ended())

    async def _hosts_ended(self) -> None:
        await self.hosts.ended()
        self._feed(e.HostsEnded())

    def _write_outcome(self) -> None:
        """Write the outcome of the run as soon as the run is ending, for services that report it."""
        if not self._outcome_due:
            return
        self._outcome_due = False
        outcome, cause = self.state.end
        try:
            partial = self._run.outcome.with_suffix(".partial")
            partial.write_text(json.dumps({"outcome": outcome.lower(), "cause": cause}))
            partial.replace(self._run.outcome)
        except OSError as error:
            self._log.warning("the outcome cannot be written", error=str(error))

    def _add_last(self) -> None:
        """Add the final states of the processes to what the monitor has written."""
        if not self._is_home:
            return
        processes = self.views.rows() + self.hosts.book.rows()
        try:
            with self._run.last.open("ab") as file:
                file.write(as_lines(process_rows(processes, time.time())))
        except OSError as error:
            self._log.warning("the last states cannot be written", error=str(error))

    def _exited(self, key: Key, pid: int, status: int) -> None:
        if key[0] == DRIVER and status == 0 and not self.state.ending:
            self._background(self._driver_exited(key, pid))
        else:
            self._feed(e.Exited(key, pid, status))

    async def _driver_exited(self, key: Key, pid: int) -> None:
        """Report the exit. A driver that drains after a SIGTERM from outside also exits with 0, so the run is complete
        only after its last step. An evaluation has no steps and exports nothing: it is complete once it has a row."""
        status = await self.sockets.status(STATUS_CALL_S)
        complete = self._run.export.is_dir() and (status is None or status.step >= status.steps)
        if status is not None and status.steps == 0:
            complete = bool(status.last_row)
        self._feed(e.Exited(key, pid, 0, run_complete=complete))

    def _on_report(self, report: ServiceReport, call: Call) -> Ack:
        key = (report.service, report.instance)
        try:
            state = ProcessState(report.state)
        except ValueError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{error}: use one of {', '.join(ProcessState)}") from None
        event = e.Reported(key, report.pid, report.incarnation, state, report.cause)
        self._feed(event)
        self._on_event(event)
        return Ack()

    def _ready_processes(self) -> Iterator[tuple[Key, int]]:
        if not self.state.ending:
            for key, process in self.state.processes.items():
                if process.state == ProcessState.READY:
                    yield key, process.pid

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await self._watch.close()
        self._runner.close()
        await self.hosts.close()
        await self.sockets.close()
        await self._programs.close_guard()
