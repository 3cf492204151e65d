"""The quickstart's speed against TRL's GRPOTrainer, one after the other on this machine. Must never change the
quickstart beyond the number of steps and leaving its evaluations out.

    python -m tests.bench.bench_quickstart                (needs `make peers`)
    python -m tests.bench.bench_quickstart --start-up     seconds from the command to the first training row

Both sides train the quickstart's model on the same rows with 512 samples a step; what is the same and what differs
stands in `peers/trl_grpo.py`. The cluster also saves its checkpoints; TRL is left without. The cluster samples while
it trains and computes the prefixes that samples of a group share once (`shared.model.tree`); TRL takes turns and pads
every sample. So the ratio belongs to this work, short answers that are alike within a group, and not to long ones.

Each side twice: by the wall clock over all steps after warm-up, and by the median of the steps, which a short
disturbance hardly moves. "others'" is the CPU time that neither this program nor the run used (steal included), in
cores over the whole run: much above zero, the figures tell about the neighbours, and TRL suffers most, because its
threads wait for one another actively.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.logs import Follower, tail
from shared.data import open_source

ROOT = Path(__file__).parents[2]
TOPOLOGY = ROOT / "launch" / "topologies" / "quickstart.yaml"
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SAMPLES_PER_STEP = 64 * 8
# Steps that run after the last measured one: samples of (staleness + 1) steps may be under way, and at the end of a run
# nothing more is sampled, so its last steps have less to do.
COOL_DOWN = 2
# How finely the arrival of a row is known; thousandths of what is measured.
POLL_S = 0.05
END_S = 30.0
SHOWN_LINES = 15


class BenchError(Exception):
    """A side that did not deliver. One line, then the last lines of its output."""


@dataclass(frozen=True)
class Arrival:
    """A row of metrics.jsonl and when it was there, in seconds since the command was given."""

    row: dict[str, Any]
    at_s: float


@dataclass(frozen=True)
class Side:
    """One side's measurement: samples/s twice, means of the last ten steps, CPU time in cores used meanwhile."""

    name: str
    wall_samples_per_s: float
    median_samples_per_s: float
    steps: int
    reward: float
    length: float
    own_cores: float
    others_cores: float


@dataclass
class Cores:
    """Cores kept busy during a measurement: by processes that this one started, and by everything else."""

    own: float = 0.0
    others: float = 0.0


@contextlib.contextmanager
def measured_cores() -> Iterator[Cores]:
    """Complete only for children that were waited for inside the block."""
    cores = Cores()
    begun_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()
    yield cores
    wall_s = time.monotonic() - begun_s
    cores.own = (_own_s() - own_s) / wall_s
    cores.others = max(0.0, (_busy_s() - busy_s) / wall_s - cores.own)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)  # the first eight do not count a guest twice


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def running(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone afterwards: asked to end, and killed with its group when it does not."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
    return BenchError("\n    ".join([what, *tail(output, SHOWN_LINES)]))


def run_cluster(
    steps: int,
    folder: Path,
    limit_s: float,
    *,
    enough: Callable[[list[Arrival]], bool],
    more: Sequence[str] = (),
) -> list[Arrival]:
    """Runs the quickstart without evaluations and returns the rows of its training steps, with the time of each.

    `more`: settings of a benchmark that is about something else than the quickstart.

    Ends the run early once `enough` says so. Raises BenchError when it fails, or is not done after `limit_s`.
    """
    run_dir, output = folder / "run", folder / "cluster.out"
    command = [sys.executable, "-m", "launch.cluster", str(TOPOLOGY), "--run-dir", str(run_dir)]
    for setting in (f"run.steps={steps}", "data.eval={}", *more):
        command += ["--set", setting]
    arrivals: list[Arrival] = []
    follower = Follower(run_dir / "metrics.jsonl")
    begun_s = time.monotonic()
    with running(command, output) as process:
        ended = False
        while not ended and not enough(arrivals):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            ended = process.poll() is not None  # before the file is read: what was written last is not missed
            at_s = time.monotonic() - begun_s
            rows = [json.loads(line) for line in follower.new_lines()]
            arrivals += [Arrival(row, at_s) for row in rows if row["step"] > 0]
            if at_s > limit_s:
                raise failed(f"the quickstart: {len(arrivals)} of {steps} steps in {limit_s:g} s (--limit-s)", output)
        if ended and (process.returncode or len(arrivals) < steps):
            raise failed(f"the quickstart: exit {process.returncode} after {len(arrivals)} of {steps} steps", output)
    return arrivals


def measure_cluster(steps: int, warm_up: int, limit_s: float) -> Side:
    """Between the row of the last warm-up step and the row of step `steps`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        arrivals = run_cluster(steps + COOL_DOWN, Path(name), limit_s, enough=lambda _: False)[:steps]
    rows = [arrival.row for arrival in arrivals]
    seconds = arrivals[-1].at_s - arrivals[warm_up - 1].at_s
    samples = sum(SAMPLES_PER_STEP - row["rollout/samples_failed"] for row in rows[warm_up:])
    return Side(
        name="rlbus quickstart",
        wall_samples_per_s=samples / seconds,
        median_samples_per_s=statistics.median(row["throughput/samples_per_s"] for row in rows[warm_up:]),
        steps=steps - warm_up,
        reward=statistics.fmean(row["reward/mean"] for row in rows[-10:]),
        length=statistics.fmean(row["rollout/length_mean"] for row in rows[-10:]),
        own_cores=cores.own,
        others_cores=cores.others,
    )


def measure_trl(steps: int, warm_up: int, threads: int, limit_s: float) -> Side:
    """Raises BenchError when it fails or is not done after `limit_s`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        rows, output = Path(name) / "train.jsonl", Path(name) / "trl.out"
        source = open_source("builtin:addition", where="bench_quickstart")
        rows.write_text("".join(json.dumps(source.row(index)) + "\n" for index in range(len(source))))
        command = [str(PEER_PYTHON), str(PEER), "--rows", str(rows), "--model", str(MODEL)]
        command += ["--steps", str(steps), "--warm-up", str(warm_up), "--threads", str(threads)]
        with running(command, output) as process:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise failed(f"TRL: not done after {limit_s:g} s (--limit-s)", output) from None
        if status:
            raise failed(f"TRL: exit {status}", output)
        result = json.loads(tail(output, 1)[0])
    return Side(
        name=f"TRL {result['trl']} GRPOTrainer",
        wall_samples_per_s=result["samples_per_s"],
        median_samples_per_s=SAMPLES_PER_STEP / statistics.median(result["step_s"][warm_up:]),
        steps=steps - warm_up,
        reward=statistics.fmean(result["reward_mean"][-10:]),
        length=statistics.fmean(result["length_mean"][-10:]),
        own_cores=cores.own,
        others_cores=cores.others,
    )


def machine() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {psutil.virtual_memory().total / 2**30:.1f} GiB"


FORM = "{:<24}{:>12}{:>13}{:>7}{:>9}{:>9}{:>11}{:>9}"
HEADER = FORM.format("samples/s", "wall clock", "median step", "steps", "reward", "tokens", "own cores", "others'")


def line(side: Side) -> str:
    """A row under HEADER."""
    return FORM.format(
        side.name,
        f"{side.wall_samples_per_s:.0f}",
        f"{side.median_samples_per_s:.0f}",
        side.steps,
        f"{side.reward:.3f}",
        f"{side.length:.2f}",
        f"{side.own_cores:.2f}",
        f"{side.others_cores:.2f}",
    )


def ratio(ours: Side, peer: Side) -> str:
    wall = ours.wall_samples_per_s / peer.wall_samples_per_s
    median = ours.median_samples_per_s / peer.median_samples_per_s
    return FORM.format("ratio", f"{wall:.2f}", f"{median:.2f}", "", "", "", "", "").rstrip()


def start_up_s(limit_s: float) -> float:
    """Seconds from the command to the first training row. Raises BenchError as `run_cluster` does."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        return run_cluster(3, Path(name), limit_s, enough=bool)[0].at_s


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart against TRL's GRPOTrainer, in samples a second.")
    parser.add_argument("--steps", type=int, default=60, help="of each side, warm-up included")
    parser.add_argument("--warm-up", type=int, default=10, help="first steps, left out")
    parser.add_argument("--threads", type=int, default=2, help="of TRL; the cluster's are the topology's")
    parser.add_argument("--only", choices=("cluster", "trl"), help="one side, no ratio")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a side that takes longer has failed")
    parser.add_argument("--start-up", action="store_true", help="only the seconds to the cluster's first row")
    args = parser.parse_args()
    if not 1 <= args.warm_up < args.steps:
        parser.error(f"--warm-up {args.warm_up} must be at least 1 and below --steps {args.steps}")
    if args.only != "cluster" and not args.start_up and not PEER_PYTHON.exists():
        sys.exit(f"bench_quickstart: {PEER_PYTHON.relative_to(ROOT)} is missing; run `make peers` first")
    print(machine(), flush=True)
    try:
        if args.start_up:
            print(f"command to first training row  {start_up_s(args.limit_s):.1f} s")
            return
        print(HEADER, flush=True)
        sides: list[Side] = []
        if args.only != "trl":
            sides.append(measure_cluster(args.steps, args.warm_up, args.limit_s))
            print(line(sides[-1]), flush=True)
        if args.only != "cluster":
            sides.append(measure_trl(args.steps, args.warm_up, args.threads, args.limit_s))
            print(line(sides[-1]), flush=True)
    except BenchError as error:
        sys.exit(f"bench_quickstart: {error}")
    if len(sides) == 2:
        print(ratio(*sides))


if __name__ == "__main__":
    main()
