"""Answers questions from observers and operators about the processes of a run. It changes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

from launch.placement.book import HostBook
from launch.spares.processes import rss_bytes
from launch.supervisor.plan import SUPERVISOR
from launch.supervisor.programs import ROOT
from launch.supervisor.state import RunLifecycle
from launch.supervisor.waits import ProcessWaits, stopped_processes
from launch.viewers.story import from_rows, to_message
from proto.errors import WireError
from proto.ids import check_task_id
from proto.messages import (
    ErrorCode,
    GetLog,
    GetStory,
    GetSupervisorState,
    GetWaits,
    LogLines,
    Ping,
    Pong,
    ProcessRow,
    SpareRow,
    Story,
    SupervisorState,
    WaitRow,
    Waits,
)
from shared.actor.logging import log_page
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rundir import RunDir


class Views:
    """Serves the states, waits, logs and stories of one run."""

    def __init__(
        self,
        run: RunDir,
        state: RunLifecycle,
        waits: ProcessWaits,
        incarnation: int,
        *,
        spares: Callable[[], list[SpareRow]],
        joined_log: Callable[[GetLog], Awaitable[LogLines]],
        hosts: HostBook | None,
    ) -> None:
        """`joined_log` returns the log of a service that the supervisor did not start.

        `hosts` records the other hosts.
        """
        self._run = run
        self._state = state
        self._waits = waits
        self._incarnation = incarnation
        self._spares = spares
        self._joined_log = joined_log
        self._hosts = hosts
        self._telling = asyncio.Lock()
        """Held while a story is prepared, so that stories are prepared one at a time."""

    def serve(self, mailbox: Mailbox) -> None:
        """Answer the requests that arrive in `mailbox`."""
        mailbox.handle(GetSupervisorState, self._get_state)
        mailbox.handle(Ping, self._ping)
        mailbox.handle(GetLog, self._get_log)
        mailbox.handle(GetWaits, self._get_waits)
        mailbox.handle(GetStory, self._get_story)

    def rows(self) -> list[ProcessRow]:
        """Return the processes on this host."""
        return [
            ProcessRow(
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

    def _ping(self, _: Ping, call: Call) -> Pong:
        return Pong(
            service=SUPERVISOR, instance=0, incarnation=self._incarnation, state=self._state.phase, at=time.time()
        )

    def _get_state(self, _: GetSupervisorState, call: Call) -> SupervisorState:
        rows = self.rows() + (self._hosts.rows() if self._hosts is not None else [])
        return SupervisorState(run=self._run.name, phase=self._state.phase, processes=rows, spares=self._spares())

    async def _get_story(self, request: GetStory, call: Call) -> Story:
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

    async def _get_waits(self, _: GetWaits, call: Call) -> Waits:
        loop = asyncio.get_running_loop()
        now = loop.time()
        rows: list[WaitRow] = self._waits.rows(self._state, now)
        # Reading all processes on the machine takes a while.
        rows += await loop.run_in_executor(None, stopped_processes, dict(self._state.pids()))
        rows += self._hosts.waits(now) if self._hosts is not None else []
        phase, phase_s = self._state.phase, self._waits.phase_s(now)
        return Waits(incarnation=self._incarnation, state=phase, state_s=phase_s, waits=rows)

    def _get_log(self, request: GetLog, call: Call) -> LogLines | Awaitable[LogLines]:
        key = (request.service, request.instance)
        if key not in self._state.processes and key != (SUPERVISOR, 0):  # names from other hosts are not used as paths
            return self._joined_log(request)
        lines, position = log_page(self._run.log_file(*key), request.lines, request.position)
        return LogLines(lines=lines, position=position)
