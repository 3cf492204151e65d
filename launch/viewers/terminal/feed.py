"""Keeps a `RunView` up to date from the monitor's stream and from the files of a run on this machine."""

from __future__ import annotations

import asyncio
import time

from launch.viewers.logs import parsed
from launch.viewers.peer import Run
from shared.followed_file import FollowedFile
from shared.metrics_follower import MetricsFollower
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security.access import Access
from shared.security.roles import Role
from shared.stream import Stream
from shared.view import RunView
from shared.warnings import parse

LOST_S = 20.0
"""Seconds of silence after which a monitor on another machine counts as lost."""
LOG_BYTES = 128 << 10
"""Number of bytes that are initially read from the end of each log."""
HISTORY_S = 2.0
"""Minimum seconds between two requests for the history."""
PAGES = 8
"""Maximum number of metrics pages that are read at once. Reading them takes about 0.1 s."""


def opened(run: Run) -> Stream:
    """Return the stream of a run. It ends with the run, or when a monitor on another machine falls silent."""

    def ended() -> bool:
        if isinstance(run, RunDir):
            return not run.sockets.exists()
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
        self._metrics = MetricsFollower(run.metrics) if isinstance(run, RunDir) else None
        self._warnings = FollowedFile(run.warnings) if isinstance(run, RunDir) else None
        self._logs: dict[str, FollowedFile] = {}

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

    def read_files(self) -> bool:
        """Read new metrics and warnings of a run on this machine, up to a few megabytes.

        Return whether there may be more to read.
        """
        if self._metrics is None or self._warnings is None:
            return False
        for line in self._warnings.new_lines():
            if warning := parse(line):
                self.view.add_warning(warning)
        for _ in range(PAGES):
            new = self._metrics.poll()
            if new.restarted:
                self.view.load_metrics([])
            for row in new.rows:
                self.view.add_metrics(row)
            if not new.more:
                return False
        return True

    async def read_all_files(self) -> None:
        """Read everything that was added to the files. Other tasks of the event loop run in between."""
        more = True
        while more:
            more = self.read_files()
            await asyncio.sleep(0)

    def read_logs(self) -> None:
        """Read what was added to the logs of a run on this machine."""
        if not isinstance(self.run, RunDir):
            return
        for path in sorted(self.run.logs.glob("*.jsonl")):
            if path.name not in self._logs:
                self._logs[path.name] = FollowedFile(path, last_bytes=LOG_BYTES)
        lines = [parsed(line) for follower in self._logs.values() for line in follower.new_lines()]
        self.view.add_log(line for line in lines if line is not None)
