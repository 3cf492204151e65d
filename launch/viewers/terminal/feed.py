"""Keeps a `RunView` up to date from the monitor's stream and from the files of a run on this machine."""

from __future__ import annotations

import asyncio
import time

from launch.viewers.ended import is_over
from launch.viewers.peer import Run
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.runfiles.files import RunFiles
from shared.security.access import Access
from shared.security.roles import Role
from shared.stream import Stream
from shared.view import RunView

LOST_S = 20.0
"""Seconds of silence after which a monitor on another machine counts as lost."""
HISTORY_S = 2.0
"""Minimum seconds between two requests for the history."""


def opened(run: Run) -> Stream:
    """Return the stream of a run. It ends with the run, or when a monitor on another machine falls silent."""

    def ended() -> bool:
        if isinstance(run, RunDir):
            return not run.sockets.exists() or is_over(run)
        return asyncio.get_running_loop().time() - stream.heard_at > LOST_S

    stream = Stream(run, ended=ended)
    return stream


class Feed:
    """One observed run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.view = RunView(metrics_from_stream=isinstance(run, Access))
        self.connected = asyncio.Event()
        """Set once the monitor's current state has arrived."""
        self.lost = 0
        """Number of updates that did not arrive because this process was too slow."""
        self.began_at = 0.0
        """Time (time.monotonic) at which the connection began, or 0."""
        self.ended = False
        """Whether the run has ended, or a run on another machine has fallen silent."""
        self._files = RunFiles(run.path, self.view) if isinstance(run, RunDir) else None

    @property
    def may_operate(self) -> bool:
        """Whether processes of the run may be restarted and drained from here."""
        return isinstance(self.run, RunDir) or self.run.role >= Role.OPERATOR

    async def follow(self) -> None:
        """Apply the stream to the view until the run ends or falls silent."""
        self.began_at = time.monotonic()
        async with opened(self.run) as stream, asyncio.TaskGroup() as group:
            keeper = group.create_task(self._keep_history(stream))
            async for row in stream.rows():
                self.view.apply(row)
                self.lost = stream.lost
                self.connected.set()
            keeper.cancel()
        self.ended = True

    async def _keep_history(self, stream: Stream) -> None:
        """Request the history once, and again whenever rows may be missing from the curves."""
        asked = False
        while True:
            if not asked or self.view.history_is_old:
                try:
                    self.view.load_history(await stream.history())
                    asked = True
                except RpcError:
                    pass  # The monitor is restarting or has an earlier version.
            await asyncio.sleep(HISTORY_S)

    def read_files(self) -> None:
        """Read new metrics and warnings of a run on this machine, up to a few megabytes."""
        if self._files is not None:
            self._files.read()

    async def read_all_files(self) -> None:
        """Read everything that was added to the files. Other tasks of the event loop run in between."""
        if self._files is not None:
            await self._files.read_all()

    def read_logs(self) -> None:
        """Read what was added to the logs of a run on this machine."""
        if self._files is not None:
            self._files.read_logs()
