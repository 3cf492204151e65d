"""Measures how long `python -m launch.monitor` takes to show a whole run: `python -m tests.bench.attach [--turns 5]`.

Each turn starts the command in an 80x24 pseudo-terminal and waits until processes, tasks and curves are on the screen.
The CPU time of the process is printed as well, because it depends less on what else the machine is doing. The time from
the connection to the monitor is also measured on its own, in a process that has already imported everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from launch.viewers.terminal.app import MonitorApp
from launch.viewers.terminal.feed import Feed
from shared.rundir import RunDir
from tests.bench.turns import Spread
from tests.integration.monitor.played_run import PlayedRun, monitored
from tests.integration.tiny.harness import ROOT

WANTED = ("2×READY", "LEASED 8", "step 40")
LIMIT_S = 60.0
COLUMNS, LINES = 80, 24


@contextlib.contextmanager
def in_terminal(run: RunDir, columns: int, lines: int) -> Iterator[tuple[int, int]]:
    """Run `python -m launch.monitor` in a pseudo-terminal. Yield its process id and the terminal's descriptor."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "launch.monitor", "--run", str(run.path)])  # noqa: S606
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    try:
        yield pid, descriptor
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


def attach(run: RunDir) -> tuple[float, float]:
    """Return the seconds from the start of the process until the picture is complete, and the CPU seconds that the
    process has used by then."""
    begun, seen = time.monotonic(), b""
    with in_terminal(run, COLUMNS, LINES) as (pid, descriptor):
        while not all(text.encode() in seen for text in WANTED) or "┤".encode() not in seen:
            ready, _, _ = select.select([descriptor], [], [], LIMIT_S)
            if not ready or time.monotonic() - begun > LIMIT_S:
                raise SystemExit(f"picture not complete within {LIMIT_S:g} s: {seen[-3000:]!r}")
            seen += os.read(descriptor, 1 << 16)
        times = psutil.Process(pid).cpu_times()
        return time.monotonic() - begun, times.user + times.system


async def connect(run: RunDir) -> float:
    """Return the seconds from the connection until the picture is complete, in this process, which has already imported
    everything.
    """
    app = MonitorApp(Feed(run))
    async with app.run_test(size=(COLUMNS, LINES)):
        while not app.shown_at:
            await asyncio.sleep(0.001)
        return app.shown_at - app.feed.began_at


async def prepare(run: RunDir) -> None:
    played = PlayedRun(run)
    played.write_steps(40)
    played.emit_all()
    await played.settle()
    await played.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder, monitored(Path(folder)) as run:
        asyncio.run(prepare(run))
        whole = [attach(run) for _ in range(turns)]
        connected = [asyncio.run(connect(run)) for _ in range(turns)]
    print(f"from the start of the process: {Spread(tuple(1e3 * wall for wall, _ in whole)).text('.0f')} ms")
    print(f"  of CPU: {Spread(tuple(1e3 * cpu for _, cpu in whole)).text('.0f')} ms")
    print(f"from the connection: {Spread(tuple(1e3 * each for each in connected)).text('.0f')} ms")


if __name__ == "__main__":
    main()
