"""Answers questions from observers and operators about the processes of a run, and says what these wait for. It changes
nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable

from launch.placement.book import HostBook
from launch.processes.plan import SUPERVISOR, Key
from launch.processes.programs import ROOT, rss_bytes, stopped_processes
from launch.supervisor.sockets import SupervisorSockets
from launch.supervisor.state import Process, RunLifecycle, RunPhase
from launch.viewers.story import from_rows, to_message
from proto import messages
from proto.errors import WireError
from proto.ids import check_task_id
from proto.messages import ErrorCode, WaitKind, WaitRow
from shared.actor.logging import log_page
from shared.actor.service import ProcessState
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir, service_name
from shared.security.curve import is_tcp

HOME = "HOME"
"""The state of the host on which the run was started, which is never awaited or lost."""
CALL_S = 1.0
"""Maximum time, in seconds, for one call. Two calls fit into the time that `ctl` waits for the supervisor."""


class Views:
    """Serves the states, waits, logs and stories of one run, and remembers when each process entered its state."""

    def __init__(
        self,
        run: RunDir,
        state: RunLifecycle,
        sockets: SupervisorSockets,
        spares: Callable[[], list[messages.SpareRow]],
        hosts: HostBook,
    ) -> None:
        """`spares` returns the rows of the spares. `hosts` records the other hosts."""
        self._run = run
        self._state = state
        self._since: dict[Key, tuple[ProcessState, bool, float]] = {}
        self._phase: tuple[RunPhase | None, float] = (None, 0.0)
        self._sockets = sockets
        self._spares = spares
        self._hosts = hosts
        self._begun = time.monotonic()
        self._telling = asyncio.Lock()
        """Held while a story is prepared, so that stories are prepared one at a time."""
        handle = sockets.mailbox.handle
        handle(messages.GetSupervisorState, self._get_state)
        handle(messages.Ping, self._ping)
        handle(messages.GetLog, self._get_log)
        handle(messages.GetWaits, self._get_waits)
        handle(messages.GetStory, self._get_story)

    def rows(self) -> list[messages.ProcessRow]:
        """Return the processes on this host."""
        return [
            messages.ProcessRow(
                service=key[0],
                instance=key[1],
                state=process.state,
                pid=process.pid,
                incarnation=process.incarnation,
                restarts=process.restarts,
                cause=process.cause,
                rss_bytes=rss_bytes(process.pid),
            )
            for key, process in self._state.processes.items()
        ]

    def note(self, now: float) -> None:
        """Record the states after an event."""
        if self._state.phase != self._phase[0]:
            self._phase = (self._state.phase, now)
        for key, process in self._state.processes.items():
            before = self._since.get(key)
            if before is None or before[:2] != (process.state, process.told_to_end):
                self._since[key] = (process.state, process.told_to_end, now)

    def _waits(self, now: float) -> list[WaitRow]:
        """Return a row for each process that is starting, stopping, or waiting for its restart."""
        rows: list[WaitRow] = []
        for key, process in self._state.processes.items():
            since = self._since[key][2] if key in self._since else now
            doing = _what(process, held=key[0] in self._state.held)
            if doing is not None:
                what, until = doing
                limit_s = until - since if until is not None else 0.0
                rows.append(WaitRow(WaitKind.PROCESS, what, now - since, max(limit_s, 0.0), service_name(*key)))
        return rows

    def _ping(self, _: messages.Ping, call: Call) -> messages.Pong:
        life = self._sockets.incarnation
        return messages.Pong(service=SUPERVISOR, instance=0, incarnation=life, state=self._state.phase, at=time.time())

    def _get_state(self, _: messages.GetSupervisorState, call: Call) -> messages.SupervisorState:
        rows = self.rows()
        return messages.SupervisorState(
            run=self._run.name,
            phase=self._state.phase,
            processes=rows + self._hosts.rows(),
            spares=self._spares(),
            hosts=self._host_rows(rows),
        )

    def _host_rows(self, here: list[messages.ProcessRow]) -> list[messages.HostRow]:
        """Return the hosts of the run, this one first, or nothing if there are no others."""
        if not self._hosts.hosts:
            return []
        now = time.monotonic()  # the clock of the event loop, and so of the book
        names = [service_name(row.service, row.instance) for row in here]
        home = messages.HostRow(self._hosts.home or socket.gethostname(), HOME, now - self._begun, 0.0, names)
        return [home, *self._hosts.host_rows(now)]

    async def _get_story(self, request: messages.GetStory, call: Call) -> messages.Story:
        """Have another process replay the journal, because the replay would keep this process from answering."""
        try:
            check_task_id(request.task_id)
        except WireError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None
        arguments = ["--run", str(self._run.path), "trace", "--json", "--", request.task_id]
        async with self._telling:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "launch.ctl", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            try:
                output, errors = await child.communicate()
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        if child.returncode:
            raise RpcError(ErrorCode.BAD_REQUEST, errors.decode(errors="replace").strip()[-1000:] or "no story")
        return to_message(from_rows(json.loads(output)["story"]))

    async def _get_waits(self, _: messages.GetWaits, call: Call) -> messages.Waits:
        loop = asyncio.get_running_loop()
        now = loop.time()
        rows = self._waits(now)
        # Reading all processes on the machine takes a while.
        rows += await loop.run_in_executor(None, stopped_processes, dict(self._state.pids()))
        rows += self._hosts.waits(now)
        phase_s = now - self._phase[1]
        return messages.Waits(
            incarnation=self._sockets.incarnation, state=self._state.phase, state_s=phase_s, waits=rows
        )

    def _get_log(self, request: messages.GetLog, call: Call) -> messages.LogLines | Awaitable[messages.LogLines]:
        key = (request.service, request.instance)
        if key not in self._state.processes and key != (SUPERVISOR, 0):  # names from other hosts are not used as paths
            return self._log_of_joined(request)
        lines, position = log_page(self._run.log_file(*key), request.lines, request.position)
        return messages.LogLines(lines=lines, position=position)

    async def _log_of_joined(self, request: messages.GetLog) -> messages.LogLines:
        """Ask a service that the supervisor did not start, because it runs on a host that has joined, for its log.

        No name received from another host is turned into a path here. Raises RpcError: bad_request if no such service
        has registered, deadline if it does not answer.
        """
        name = service_name(request.service, request.instance)
        try:
            ask = messages.Resolve(service=request.service, instance=request.instance)
            where = await self._sockets.announced("scheduler").call(ask, messages.Resolved, deadline_s=CALL_S)
        except RpcError:
            raise RpcError(ErrorCode.BAD_REQUEST, f"no service {name}") from None
        remote = is_tcp(where.endpoint)
        if not where.endpoint or (remote and self._sockets.keys is None):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{name} cannot be asked for its log: this host cannot reach it")
        sockets = self._sockets
        client = Client(
            sockets.context, where.endpoint, name, sockets.incarnation, keys=sockets.keys if remote else None
        )
        try:
            return await client.call(request, messages.LogLines, deadline_s=CALL_S)
        finally:
            client.close()


def _what(process: Process, *, held: bool) -> tuple[str, float | None] | None:
    """Return a description of what a process is doing, and its deadline if it has one.

    Return None if the process is simply running or has ended.
    """
    name = service_name(*process.key)
    if process.told_to_end and process.pid:
        return f"{name} is stopping, as requested", process.kill_at
    match process.state:
        case ProcessState.STARTING:
            return f"{name} is starting" + (f" again after {process.cause}" if process.cause else ""), process.ready_by
        case ProcessState.BACKOFF:
            return f"{name} died ({process.cause}) and will start again, restart {process.restarts}", process.start_at
        case ProcessState.WAITING if held:
            return f"{name} will be started once its libraries have been imported (run.spares)", None
        case ProcessState.WAITING:
            return f"{name} will be started once the scheduler, stores and monitor are READY", None
        case _:
            return None
