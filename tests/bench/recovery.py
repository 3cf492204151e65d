"""Measures the seconds from a kill of each service to the next commit, on the quickstart without its evaluations.

    python -m tests.bench.recovery                     every service, five times
    python -m tests.bench.recovery --set run.spares=false
    python -m tests.bench.recovery --only rollout --timeline    what the processes log until the run continues
    python -m tests.bench.recovery --only critic --set 'critic={optimizer: {lr: 1.0e-3}}' \\
        --set 'algorithm.advantage={name: gae}'

A service is killed with SIGKILL once all services are READY and `CALM_STEPS` steps have been committed since then. Two
times are measured. `next commit` ends with the next row of metrics.jsonl; training may continue for a while with data
that the killed service had already produced. `with it` ends with the first row after the new process is READY. A row is
seen at most `POLL_S` late.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shared.runfiles.lines import FollowedFile
from shared.topology import TopologyError, load
from tests.bench.cluster_run import TOPOLOGY, Arrival, BenchError, run_cluster
from tests.bench.turns import heading, spread

CALM_STEPS = 5
"""Number of steps between the moment at which every service is READY and the kill. The kill occurs at a random moment
of the following step.
"""
STEP_S = 1.0
"""Length of the range from which that moment is drawn, about one step."""
ENOUGH_STEPS = 100_000


@dataclass
class Kill:
    """A kill and the events that followed, in seconds of the wall clock."""

    service: str
    pid: int
    at: float
    steps: int
    """Number of rows at the time of the kill."""
    ready: float | None = None
    next_commit: float | None = None
    with_it: float | None = None


@dataclass
class Trial:
    """A watcher that reads the logs of a run and kills its services in turn."""

    folder: Path
    services: frozenset[str]
    """Services of the run."""
    queue: list[str]
    chance: random.Random
    timeline: bool
    done: list[Kill] = field(default_factory=list)
    _kill: Kill | None = None
    _followers: dict[Path, FollowedFile] = field(default_factory=dict)
    _events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    _pids: dict[str, int] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _calm_since: int | None = None
    _kill_at: float = 0.0

    def watch(self, _: int, arrivals: list[Arrival]) -> None:
        """Read new rows and log lines, and kill the next service if its kill is due."""
        for at, name, entry in self._new_events():
            self._take(at, name, entry)
        now, rows = time.time(), len(arrivals)
        if self._kill is not None:
            self._finish(self._kill, now, rows)
            return
        if not self._ready >= self.services or not self.queue:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = rows
        elif rows >= self._calm_since + CALM_STEPS:
            self._kill_at = self._kill_at or now + self.chance.random() * STEP_S
            if now >= self._kill_at:
                self._strike(self.queue.pop(0), rows)

    def _strike(self, service: str, rows: int) -> None:
        self._kill_at, self._calm_since = 0.0, None
        self._ready.discard(service)
        pid = self._pids[service]
        self._kill = Kill(service, pid, time.time(), rows)
        os.kill(pid, signal.SIGKILL)

    def _finish(self, kill: Kill, now: float, rows: int) -> None:
        if kill.next_commit is None and rows > kill.steps:
            kill.next_commit = now - kill.at
            kill.steps = rows
        if kill.ready is None and kill.service in self._ready:
            kill.ready = now - kill.at
            kill.steps = rows
        elif kill.ready is not None and kill.with_it is None and rows > kill.steps:
            kill.with_it = now - kill.at
        if kill.next_commit is not None and kill.with_it is not None:
            self.done.append(kill)
            self._kill = None
            print(
                f"{kill.service:<22} next commit {kill.next_commit:6.2f} s   READY {kill.ready or 0:6.2f} s   "
                f"with it {kill.with_it:6.2f} s",
                flush=True,
            )
            if self.timeline:
                self._print_timeline(kill)

    def _take(self, at: float, name: str, entry: dict[str, Any]) -> None:
        event = entry.get("event")
        if name == "supervisor":
            service = str(entry.get("name", "")).partition("/")[0]
            if event == "started":
                self._pids[service] = int(entry["pid"])
                self._ready.discard(service)
        elif event == "state":
            if entry.get("state") == "READY":
                self._ready.add(name)
            else:
                self._ready.discard(name)

    def _new_events(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        for path in self.folder.glob("run/logs/*.jsonl"):
            for line in self._followers.setdefault(path, FollowedFile(path)).new_lines():
                entry = json.loads(line)
                at = datetime.fromisoformat(entry["timestamp"]).timestamp()
                name = path.stem.rpartition("-")[0]
                self._events.append((at, name, entry))
                yield at, name, entry

    def _print_timeline(self, kill: Kill) -> None:
        for at, name, entry in sorted(self._events, key=lambda each: each[0]):
            if kill.at - 0.05 <= at <= time.time():
                hidden = ("timestamp", "event", "incarnation", "run", "level", "exception", "instance")
                fields = " ".join(f"{key}={value}" for key, value in entry.items() if key not in hidden)
                print(f"    {at - kill.at:+7.3f}  {name:<22} {entry.get('event')}  {fields[:150]}", flush=True)
        self._events.clear()


def services_of(settings: Sequence[str]) -> list[str]:
    """Return the services of the quickstart with these settings. Raises BenchError."""
    try:
        return list(dict.fromkeys(spec.service for spec in load(str(TOPOLOGY), settings).services_plan()))
    except TopologyError as error:
        raise BenchError(f"--set: {error}") from None


def measure(services: Sequence[str], args: argparse.Namespace) -> list[Kill]:
    """Run the quickstart and kill each of `services` `args.turns` times, in a random order within each turn."""
    running = services_of(args.settings)
    absent = [service for service in services if service not in running]
    if absent:
        raise BenchError(f"--only {absent[0]}: the run has no such service; use {', '.join(running)}, or --set")
    chance = random.Random(args.seed)
    queue = [service for _ in range(args.turns) for service in chance.sample(services, len(services))]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        trial = Trial(Path(name), frozenset(running), queue, chance, args.timeline)
        run_cluster(
            ENOUGH_STEPS,
            Path(name),
            args.limit_s,
            settings=args.settings,
            watch=trial.watch,
            enough=lambda _: len(trial.done) == args.turns * len(services),
        )
        return trial.done


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from a kill to the next commit, by service.")
    parser.add_argument("--turns", type=int, default=5, help="kills of each service")
    parser.add_argument("--only", metavar="SERVICE", help="kill one service only")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting of the topology")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the moments of the kills")
    parser.add_argument("--timeline", action="store_true", help="print what the processes log after each kill")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    print(heading())
    try:
        services = [args.only] if args.only else services_of(args.settings)
        kills = measure(services, args)
    except BenchError as error:
        sys.exit(f"recovery: {error}")
    by_service: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        by_service[kill.service].append(kill)
    print(f"figures   seconds, median [minimum, maximum] of {args.turns} kills per service")
    for service in services:
        first = spread(kill.next_commit or 0.0 for kill in by_service[service])
        whole = spread(kill.with_it or 0.0 for kill in by_service[service])
        print(f"{service:<22} next commit {first.text('.1f'):<18} with it {whole.text('.1f')}")


if __name__ == "__main__":
    main()
