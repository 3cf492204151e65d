"""Measures the CPU usage of the terminal interface, by view: `python -m tests.bench.terminal_cpu [--seconds 20]`.

A real monitor receives one step and the telemetry of one round a second, as in a run. `python -m launch.monitor` shows
them in a 200x60 pseudo-terminal, in each of its views in turn. A usage is the CPU time of that process, relative to the
time that passed, once the view has been drawn for `SETTLE_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import psutil

from launch.viewers.terminal.app import TABS
from shared.rundir import RunDir
from tests.bench.attach import in_terminal
from tests.integration.monitor.played_run import PlayedRun, monitored

COLUMNS, LINES = 200, 60
SETTLE_S = 5.0
STEPS = 200
"""Number of steps in the history of the run when the interface starts."""


async def usage(process: psutil.Process, seconds: float) -> float:
    """Return the CPU usage of a process, as a fraction of a core, over the next seconds."""
    before, begun = process.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after, passed = process.cpu_times(), time.monotonic() - begun
    return float(after.user + after.system - before.user - before.system) / passed


async def measure(run: RunDir, seconds: float) -> None:
    """Print the usage in every view, and the rate of the rows."""
    played = PlayedRun(run)
    played.write_steps(STEPS)
    played.emit_all()
    begun, first = time.monotonic(), (await played.settle()).sequence
    playing = asyncio.create_task(played.play(len(TABS) * (SETTLE_S + seconds) + SETTLE_S))
    with in_terminal(run, COLUMNS, LINES) as (pid, descriptor):
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, os.read, descriptor, 1 << 20)
        process = psutil.Process(pid)
        for number, tab in enumerate(TABS, 1):
            os.write(descriptor, str(number).encode())
            await asyncio.sleep(SETTLE_S)
            print(f"{tab:<10} {100 * await usage(process, seconds):.1f} % of a core", flush=True)
        loop.remove_reader(descriptor)
    await playing
    rows = (await played.settle()).sequence - first
    print(f"{rows / (time.monotonic() - begun):.0f} rows/s")
    await played.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the measurement in each view")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, monitored(Path(folder)) as run:
        asyncio.run(measure(run, seconds))


if __name__ == "__main__":
    main()
