"""Runs the quickstart for benchmarks that time it, and measures the CPU time that it and all other programs use.

A benchmark may change the number of steps, leave evaluations out, and add the settings under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import tail

ROOT = Path(__file__).parents[2]
TOPOLOGY = ROOT / "launch" / "topologies" / "quickstart.yaml"
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
SAMPLES_PER_STEP = 64 * 8
POLL_S = 0.05
"""Resolution of a row's arrival time, a few thousandths of the measured times."""
END_S = 30.0
SHOWN_LINES = 15


class BenchError(Exception):
    """An error on one side of a benchmark. The message is one line, followed by the last lines of that side's
    output."""


@dataclass(frozen=True)
class Arrival:
    """A row of metrics.jsonl and the time of its arrival, in seconds since the start of the command."""

    row: dict[str, Any]
    at_s: float


@dataclass
class Cores:
    """Number of cores kept busy during a measurement by this process's children and by all other programs."""

    own: float = 0.0
    others: float = 0.0


@contextlib.contextmanager
def measured_cores() -> Iterator[Cores]:
    """Measure the block. `own` includes only children that this process has waited for within the block."""
    cores = Cores()
    begun_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()
    yield cores
    wall_s = time.monotonic() - begun_s
    cores.own = (_own_s() - own_s) / wall_s
    cores.others = max(0.0, (_busy_s() - busy_s) / wall_s - cores.own)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)  # The first eight fields do not count guest time twice.


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def running(
    command: list[str], output: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child, with `environment` added to the variables of this process. Afterwards, terminate it, and kill its
    process group if it does not exit."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)


def failed(what: str, output: Path) -> BenchError:
    """Return the error of a side that wrote `output`, with the last lines of that file."""
    return BenchError("\n    ".join([what, *tail(output, SHOWN_LINES)]))


def last_line(command: Sequence[str], what: str, limit_s: float) -> dict[str, Any]:
    """Run `command` and return the JSON object on its last line. Raises BenchError if the command fails or exceeds
    `limit_s`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        output = Path(name) / "child.out"
        with running(list(command), output) as process:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise failed(f"{what}: not done after {limit_s:g} s", output) from None
        if status:
            raise failed(f"{what}: exit {status}", output)
        found: dict[str, Any] = json.loads(tail(output, 1)[0])
        return found


def run_cluster(
    steps: int,
    folder: Path,
    limit_s: float,
    *,
    settings: Sequence[str] = (),
    watch: Callable[[int, list[Arrival]], object] = lambda _launcher, _arrivals: None,
    enough: Callable[[list[Arrival]], bool] = lambda _: False,
) -> list[Arrival]:
    """Run the quickstart without evaluations and return the rows of its training steps with their arrival times.

    `settings` are added as `--set`. `watch` is called with the launcher's pid after each poll of the rows. The run ends
    early once `enough(rows)` is true. Raises BenchError if the run fails or exceeds `limit_s`.
    """
    run_dir, output = folder / "run", folder / "cluster.out"
    command = [sys.executable, "-m", "launch.cluster", str(TOPOLOGY), "--run-dir", str(run_dir)]
    for setting in (f"run.steps={steps}", "data.eval={}", *settings):
        command += ["--set", setting]
    arrivals: list[Arrival] = []
    follower = FollowedFile(run_dir / "metrics.jsonl")
    begun_s = time.monotonic()
    with running(command, output) as process:
        ended = False
        while not ended and not enough(arrivals):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            # This is checked before the file is read, so that the last row is not missed.
            ended = process.poll() is not None
            at_s = time.monotonic() - begun_s
            rows = [json.loads(line) for line in follower.new_lines()]
            arrivals += [Arrival(row, at_s) for row in rows if row["step"] > 0]
            if not ended:
                watch(process.pid, arrivals)
            if at_s > limit_s:
                raise failed(f"the quickstart: {len(arrivals)} of {steps} steps in {limit_s:g} s (--limit-s)", output)
        if ended and (process.returncode or len(arrivals) < steps):
            raise failed(f"the quickstart: exit {process.returncode} after {len(arrivals)} of {steps} steps", output)
    return arrivals
