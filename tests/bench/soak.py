"""Runs every service for a while and fails if a process or a file of the run grows.

    python -m tests.bench.soak [--minutes 30] [--warm-up 10] [--set a.b=v]… [--record FILE] [--keep DIR]

The run is the quickstart with small steps, so that there are many of them, and with all optional services: the
reference, evaluations, checkpoints, the recorder, a tracker, the exporter with Prometheus and traces, the page, and a
second host on this machine, which has a store and samples the answers. Both HTTP addresses are read twice a minute.
After the warm-up, the growth of each process is judged as in `tests.bench.growth`, and each file of the run directory
is compared with its bound. The exit status is 1 if anything grows or exceeds its bound; a line names each case.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shared.runfiles.lines import FollowedFile
from tests.bench.cluster_run import TOPOLOGY, BenchError, failed, running
from tests.bench.growth import FileBound, Growth, Sample, growths, sizes, too_large, usages
from tests.bench.turns import heading

HOST = "b"
SAMPLE_S = 2.0
START_S = 300.0
"""Maximum seconds until the first step."""
STALLED_S = 120.0
"""Seconds without a step after which the run counts as failed."""
READ_S = 60.0
MOST_WARM_UP_MIN = 10.0
KIB, MIB = 1 << 10, 1 << 20
LOOK_S = 30.0
"""Seconds from one look at the files and the pages to the next."""
SAMPLES_BYTES = TRACES_BYTES = MIB

BOUNDS = (
    FileBound("metrics*.jsonl", 16 * KIB, per_step=2 * KIB),
    FileBound("journal.sqlite", 48 * MIB),
    FileBound("journal.sqlite-wal", 64 * MIB),
    FileBound("journal.sqlite-*", MIB),
    FileBound("samples/", SAMPLES_BYTES),
    FileBound("traces/", TRACES_BYTES),
    FileBound("logs/*", MIB),
    FileBound("tensorboard/", MIB, per_step=2 * KIB),
    FileBound("trackers/", MIB),
    FileBound("checkpoints/", 64 * MIB),
    FileBound("*", MIB),
)
"""The bounds of the files of this run. Checkpoints hold a model of 1 MB."""


def settings(web: int, prometheus: int, ports: dict[str, int]) -> list[str]:
    """Return the settings of the run, given the ports to use."""
    return [
        "run.steps=1000000",
        "algorithm.tasks_per_step=16",
        "algorithm.group_size=4",
        "services.batch-store.memory=128MiB",
        f"services.rollout.host={HOST}",
        f"placement.hosts={{{HOST}: {{}}}}",
        "transport.listen=127.0.0.1",
        *(f"transport.{name}={port}" for name, port in ports.items()),
        f'monitor.web={{listen: "127.0.0.1:{web}"}}',
        f'monitor.prometheus={{listen: "127.0.0.1:{prometheus}"}}',
        f"monitor.traces={{file_limit: {TRACES_BYTES}}}",
        f"monitor.samples.limit_bytes={SAMPLES_BYTES}",
        "monitor.tensorboard={}",
    ]


class Soak:
    """A run that is sampled until enough time has passed."""

    def __init__(self, folder: Path, extra: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`folder` holds the run directory and the output. `extra` are settings that override those of `settings`, and
        `environment` is added to the variables of all processes."""
        self.run = folder / "run"
        self._folder = folder
        self._output = folder / "cluster.out"
        self._rows = FollowedFile(self.run / "metrics.jsonl")
        self._step = 0
        web, prometheus, *others = _free_ports(5)
        self._pages = ((web, "/"), (prometheus, "/metrics"))
        ports = dict(zip(("scheduler_port", "supervisor_port", "monitor_port"), others, strict=True))
        self._sets = [word for each in (*settings(web, prometheus, ports), *extra) for word in ("--set", each)]
        self._environment = environment

    def samples(self, minutes: float) -> Iterator[Sample]:
        """Run until `minutes` after the first step, and yield a sample every `SAMPLE_S` seconds from then on.

        Raises BenchError if the run fails or makes no progress.
        """
        access = self._folder / "access"
        launcher = [sys.executable, "-m", "launch.cluster", str(TOPOLOGY), "--run-dir", str(self.run), *self._sets]
        agent = [sys.executable, "-m", "launch.host", "--name", HOST, "--access", str(access)]
        agent += ["--wait", f"{START_S:g}", "--run-dir", str(self._folder / "host")]
        with (
            running([*launcher, "--export-access", str(access)], self._output, self._environment) as home,
            running(agent, self._folder / "host.out", self._environment) as away,
        ):
            self._await_step(home, time.monotonic() + START_S)
            began = stepped = time.monotonic()
            before, look_at = self._step, began
            while (now := time.monotonic()) - began < 60 * minutes:
                self._await_step(home, now)
                if self._step > before:
                    before, stepped = self._step, now
                if now - stepped > STALLED_S:
                    raise failed(f"no step for {STALLED_S:g} s after step {before}", self._output)
                usage = usages(home.pid) | {f"{HOST}: {name}": each for name, each in usages(away.pid).items()}
                files: dict[str, int] = {}
                if now >= look_at:
                    look_at = now + LOOK_S
                    files = sizes(self.run)
                    self._visit()
                yield Sample((now - began) / 60, self._step, usage, files)
                time.sleep(max(0.0, now + SAMPLE_S - time.monotonic()))

    def _await_step(self, home: subprocess.Popen[bytes], until: float) -> None:
        """Read the new rows, and wait for the first one until the time `until`. Raises BenchError."""
        while True:
            if home.poll() is not None:
                raise failed(f"the run ended with status {home.returncode} after step {self._step}", self._output)
            for line in self._rows.new_lines():
                self._step = json.loads(line)["step"]
            if self._step or time.monotonic() >= until:
                break
            time.sleep(0.5)
        if not self._step:
            raise failed(f"no step in {START_S:g} s", self._output)

    def _visit(self) -> None:
        """Read the page and the metrics, as a browser and a scraper do. Raises BenchError."""
        for port, path in self._pages:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_S)
            try:
                connection.request("GET", path)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException) as error:
                raise failed(f"{path} at port {port}: {error!r}", self._output) from None
            finally:
                connection.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def table(found: Sequence[Growth]) -> Iterator[str]:
    """Yield the lines of a table with a row for each process and a column for each quantity."""
    names = sorted({each.process for each in found})
    heads = list(dict.fromkeys(each.quantity.name for each in found))
    yield f"{'early, late, growth per minute':<36}" + "".join(f"{head:>30}" for head in heads)
    for name in names:
        cells = []
        for each in found:
            if each.process == name:
                unit, form = each.quantity.unit, each.quantity.form
                cells.append(f"{each.early / unit:{form}}, {each.late / unit:{form}}, {each.per_min / unit:+.3f}")
        yield f"{name:<36}" + "".join(f"{cell:>30}" for cell in cells)


def verdict(samples: Sequence[Sample], warm_up_min: float) -> tuple[list[Growth], list[str]]:
    """Return the growth after the warm-up, and a line for each process or file that grows beyond its limit.

    Raises ValueError if there are too few samples after the warm-up.
    """
    judged = [sample for sample in samples if sample.minute >= warm_up_min]
    found = growths(judged)
    large = {line.partition(":")[0]: line for sample in judged for line in too_large(sample, BOUNDS)}
    return found, [*(str(each) for each in found if each.is_too_fast), *large.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description="A run of all services, which fails if a process or a file grows.")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the run from its first step")
    parser.add_argument("--warm-up", type=float, help="minutes that are not judged (default: 10, at most a third)")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    parser.add_argument("--record", type=Path, help="file for the samples, a line for each")
    parser.add_argument("--keep", type=Path, help="folder for the run directory (default: a temporary one)")
    args = parser.parse_args()
    warm_up = min(MOST_WARM_UP_MIN, args.minutes / 3) if args.warm_up is None else args.warm_up
    if not 0 <= warm_up < args.minutes:
        parser.error(f"--warm-up {warm_up:g} must be at least 0 and less than --minutes {args.minutes:g}")
    print(heading(), flush=True)
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        record = stack.enter_context(args.record.open("w")) if args.record else None
        samples: list[Sample] = []
        try:
            for sample in Soak(folder, args.sets).samples(args.minutes):
                samples.append(sample)
                if record is not None:
                    print(sample.to_json(), file=record, flush=True)
            found, offenders = verdict(samples, warm_up)
        except (BenchError, ValueError) as error:
            sys.exit(f"soak: {error}")
    steps = samples[-1].step
    print(f"run       {args.minutes:g} minutes, {steps} steps; the first {warm_up:g} minutes are not judged")
    print("\n".join(table(found)))
    for line in offenders:
        print(f"soak: {line}", file=sys.stderr)
    sys.exit(1 if offenders else 0)


if __name__ == "__main__":
    main()
