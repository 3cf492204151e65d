"""Follows a run's monitor stream and its files, and serves both to browsers as the page of the run.

The page needs nothing but the run directory. A run that has ended, or has not begun, is shown from its files alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import structlog
import zmq

from proto.errors import WireError
from proto.ids import new_incarnation
from proto.messages import Ack, DrainService, ErrorCode, GetSupervisorState, RestartService, SupervisorState
from services.web import parts
from services.web.live_parts import LiveParts
from shared.names import listed
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name
from shared.runfiles.files import RunFiles
from shared.stream import Stream
from shared.view import look
from shared.view.services import process_rows

TICK_S = 1.0
"""Seconds between two updates of the live parts."""
MAX_OTHERS = 12
"""Maximum number of other runs whose metrics are kept. The least recently requested run is removed first."""
MAX_RUNS = 200
"""Maximum number of other runs that are offered for comparison. The newest runs are offered."""
CALL_S, STATE_S = 5.0, 2.0
"""Deadlines, in seconds, of commands to the supervisor and of questions about its processes."""


class SupervisorCalls:
    """Calls to the supervisor of a run on this host: process states, and commands from visitors who have the operator
    token."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunDir) -> None:
        self._client = Client(context, run.endpoint("supervisor", 0), "supervisor/0", new_incarnation())

    async def state(self) -> SupervisorState:
        """Return the processes of the run. Raises RpcError."""
        return await self._client.call(GetSupervisorState(), SupervisorState, deadline_s=STATE_S)

    async def act(self, action: str, name: str) -> None:
        """Restart or drain `NAME` or `NAME/INSTANCE`. Raises RpcError."""
        service, instance = parse_service_name(name)
        match action:
            case "restart":
                await self._client.call(RestartService(service=service, instance=instance), Ack, deadline_s=CALL_S)
            case "drain":
                await self._client.call(DrainService(service=service, instance=instance), Ack, deadline_s=CALL_S)
            case _:
                raise RpcError(ErrorCode.BAD_REQUEST, f"{action[:20]!r}: not an action; use restart or drain")

    def close(self) -> None:
        self._client.close()


class Page:
    """The live view of one run, and the metrics of the other runs in the same folder."""

    def __init__(self, path: Path, *, operable: bool) -> None:
        """If `operable`, the page offers the operator's buttons."""
        self.parts = LiveParts()
        self.own = RunFiles(path)
        self.calls: SupervisorCalls | None = None
        """Calls to the supervisor while the run is live."""
        self._others: dict[str, RunFiles] = {}
        self._operable = operable
        self._log = structlog.get_logger("web")

    async def run(self) -> None:
        """Follow the run, across its restarts, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._tick())

    def runs(self) -> list[str]:
        """Return the names of the runs in the same folder as this one, newest first."""
        names = []
        for folder in listed(self.own.path.parent.iterdir()):
            with contextlib.suppress(OSError):
                if folder != self.own.path and folder.name[:1] != ".":
                    names.append(((folder / "run.json").stat().st_mtime, folder.name))
        return [name for _, name in sorted(names, reverse=True)[:MAX_RUNS]]

    async def files(self, name: str) -> RunFiles | None:
        """Return the up-to-date files of this run or of another run in the same folder, or None if there is no such
        run."""
        if name in ("", self.own.path.name):
            await self.own.read_all()
            return self.own
        if name not in self._others and name not in self.runs():
            return None
        files = self._others.pop(name, None) or RunFiles(self.own.path.parent / name)
        self._others[name] = files
        while len(self._others) > MAX_OTHERS:
            self._others.pop(next(iter(self._others)))
        await files.read_all()
        return files

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(RpcError):
                run = RunDir.open(self.own.path)
                if run.sockets.exists():
                    await self._follow_life(run)
            await asyncio.sleep(TICK_S)

    async def _follow_life(self, run: RunDir) -> None:
        """Follow the run from its start or resumption to its end."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.calls = SupervisorCalls(context, run)
        background = [asyncio.create_task(self._watch_processes(self.calls))]
        try:
            async with Stream(run, ended=lambda: not run.sockets.exists()) as stream:
                background.append(asyncio.create_task(self._load_spans(stream)))
                async for row in stream.rows():
                    self.own.view.apply(row)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self.calls.close()
            self.calls = None
            await asyncio.get_running_loop().run_in_executor(None, context.term)

    async def _load_spans(self, stream: Stream) -> None:
        """Add the spans from before the page followed the run to the timeline."""
        while True:
            with contextlib.suppress(RpcError):
                self.own.view.load_history(await stream.history())
                return
            await asyncio.sleep(TICK_S)

    async def _watch_processes(self, calls: SupervisorCalls) -> None:
        """Poll the supervisor while a browser is following the run. The supervisor is the first to notice a dead
        process."""
        while True:
            if self.parts.watchers:
                with contextlib.suppress(RpcError, WireError):
                    for row in process_rows((await calls.state()).processes, time.time()):
                        self.own.view.apply(row)
            await asyncio.sleep(TICK_S)

    async def _tick(self) -> None:
        while True:
            if self.parts.watchers or not self.parts.filled:
                try:
                    await self._show()
                except OSError as error:
                    self._log.warning("the run directory cannot be read", error=str(error))
            await asyncio.sleep(TICK_S)

    async def _show(self) -> None:
        """Update the live parts with the current state."""
        await self.own.read_all()
        view, live = self.own.view, self.calls is not None
        if not live:
            self.own.read_last()
        now = time.time() if live else view.newest_at
        self.parts.put("look", look.document())
        self.parts.put("head", parts.head(self.own, self.runs(), live=live, operable=self._operable and live))
        self.parts.put("services", view.services(now))
        self.parts.put("pipeline", view.pipeline())
        self.parts.put("notices", parts.notices(self.own, live=live))
