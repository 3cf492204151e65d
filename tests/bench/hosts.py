"""Measures the overhead of Ray in a run with another host, and how soon the work of a lost host is leased again:
`python -m tests.bench.hosts`.

All nodes are on this machine. The start and the steps of the quickstart are timed with its rollout on another host.
Runs alternate between placement by Ray on a running cluster and placement by an agent that is started as soon
as the run exists.
Then a node is killed in each of several longer runs. The program prints one JSON object for each run and each loss, and
the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.commands import access
from services.scheduler import run_state
from services.scheduler.events import LeaseExpired
from services.scheduler.journal_files import reading
from services.scheduler.planning import make_plan
from services.scheduler.run_state import RunState
from shared.rundir import RunDir
from shared.runfiles.lines import FollowedFile
from shared.security.roles import Role
from shared.topology import load
from tests.bench.turns import by_turns, heading, ratios, spread
from tests.integration.hosts.ray_cluster import RayCluster, Told, ray_cluster, run_on
from tests.integration.tiny.harness import ROOT, ctl, environment, wait_for

STEPS = 250
WARM_STEPS = 50
"""Number of steps before the first step that is measured: Ray starts processes of its own during the first seconds."""
LIMIT_S = 240.0
ROLLOUT_ON_B = ("services.rollout.host=b", "transport.listen=127.0.0.1")
TWO_HOSTS = ("placement={engine: ray, hosts: {b: {}, c: {}}}", "services.rollout={host: [b, c], instances: 2}")
VICTIM = ("rollout", 1)
"""The rollout whose host is killed."""
MOST_TRIES = 5
"""Maximum number of runs until the victim holds a lease when its host is killed."""


@dataclass(frozen=True)
class Timed:
    """Seconds from the command to the first committed step, and seconds per step."""

    start_s: float
    step_s: float


def timed_run(cluster: RayCluster, engine: str) -> Timed:
    """Run the quickstart with its rollout on host b."""
    settings = (*ROLLOUT_ON_B, f"placement={{engine: {engine}, hosts: {{b: {{}}}}}}", f"run.steps={STEPS}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "run"
        begun = time.monotonic()
        launcher = stack.enter_context(run_on(cluster, path, *settings))
        told = Told(launcher)
        if engine == "local":
            stack.enter_context(_agent(path, launcher))
        rows: list[float] = []
        follower = FollowedFile(path / "metrics.jsonl")
        while launcher.poll() is None or len(rows) < STEPS:
            rows += [time.monotonic() - begun for _ in follower.new_lines()]
            if launcher.poll() not in (None, 0):
                sys.exit("hosts: " + "\n    ".join(told.lines[-15:]))
            time.sleep(0.01)  # the resolution of the times
        done = Timed(rows[0], (rows[STEPS - 1] - rows[WARM_STEPS - 1]) / (STEPS - WARM_STEPS))
    _print(engine=engine, start_s=done.start_s, step_s=done.step_s)
    return done


def _print(**values: float | str) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps(rounded), flush=True)


@contextlib.contextmanager
def _agent(path: Path, launcher: subprocess.Popen[str]) -> Iterator[None]:
    wait_for("the run", lambda: (path / "run.json").exists() or launcher.poll() is not None, LIMIT_S)
    access.export(RunDir.open(path), Role.SERVICE, path / "access")
    command = [sys.executable, "-m", "launch.host", "--access", str(path / "access"), "--name", "b"]
    agent = subprocess.Popen(
        [*command, "--run-dir", str(path / "hosts" / "b")], cwd=ROOT, env=environment(""), stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


@dataclass(frozen=True)
class Loss:
    """Seconds from the kill of a node until Ray noticed the loss, and from then until the node's work was leased
    elsewhere."""

    noticed_s: float
    leased_s: float
    tasks: int


def loss(cluster: RayCluster) -> Loss:
    """In a run with a rollout on each of two nodes, kill a node while its rollout holds a lease."""
    for _ in range(MOST_TRIES):
        if (found := _loss(cluster)) is not None:
            _print(noticed_s=found.noticed_s, leased_s=found.leased_s, tasks=found.tasks)
            return found
    sys.exit(f"hosts: in {MOST_TRIES} runs, the killed node's rollout held no lease")


def _loss(cluster: RayCluster) -> Loss | None:
    """Return None if the rollout on the killed node held no lease at that moment."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "run"
        with run_on(cluster, path, *TWO_HOSTS, "run.steps=100000") as launcher:
            told = Told(launcher)
            wait_for("training", lambda: told.step() >= WARM_STEPS or launcher.poll() is not None, LIMIT_S)
            killed_at = time.time()
            cluster.kill("c")
            told.wait_for("host c is lost")
            noticed_at = time.time()
            step = told.step()
            wait_for("more steps", lambda: told.step() >= step + 2, LIMIT_S)
            tasks, leased_at = _leased_again(path, killed_at)
            ctl(path, "stop")
            launcher.wait(LIMIT_S)
        cluster.add("c")
    return Loss(noticed_at - killed_at, leased_at - noticed_at, tasks) if tasks else None


def _leased_again(path: Path, killed_at: float) -> tuple[int, float]:
    """Return the number of tasks whose leases the victim lost after `killed_at`, and the time at which the last of them
    was leased again.
    """
    run = RunDir.open(path)
    plan, _ = make_plan(load(run.topology), run.topology)
    lost: set[str] = set()
    count, last_at = 0, 0.0
    with reading(run.journal) as recorded:
        parts = recorded.snapshot()
        state = run_state.load(plan, parts) if parts else RunState(plan)
        for at, event in recorded.events():
            if isinstance(event, LeaseExpired) and at > killed_at:
                lease = state.ledger.leases.get(event.lease_id)
                if lease is not None and lease.holder == VICTIM:
                    lost |= lease.tasks.keys()
                    count += len(lease.tasks)
            newest = state.ledger.leases.next_id
            state.apply(event)
            state.out.clear()
            granted = state.ledger.leases.get(newest)
            if granted is not None and granted.stage == 0 and lost & granted.tasks.keys():
                lost -= granted.tasks.keys()
                last_at = at
    if lost:
        sys.exit(f"hosts: {len(lost)} of {count} tasks of the lost host were not leased again")
    return count, last_at


def main() -> None:
    parser = argparse.ArgumentParser(description="What Ray adds to a run, and how soon a lost host is replaced.")
    parser.add_argument("--turns", type=int, default=2, help="runs of each engine")
    parser.add_argument("--losses", type=int, default=2, help="number of nodes to kill, one in each run")
    args = parser.parse_args()
    print(heading())
    with ray_cluster("b", "c") as cluster:
        engines = {engine: functools.partial(timed_run, cluster, engine) for engine in ("local", "ray")}
        runs = by_turns(engines, args.turns)
        lost = [loss(cluster) for _ in range(args.losses)]
    local, ray = runs["local"], runs["ray"]
    added = spread(mine.start_s - theirs.start_s for mine, theirs in zip(ray, local, strict=True))
    print(f"Ray adds to a start, s        {added.text('.1f')}")
    steps = ratios((each.step_s for each in ray), (each.step_s for each in local))
    print(f"a step / one without Ray      {steps.text('.3f')}")
    if lost:
        print(f"loss noticed after, s         {spread(each.noticed_s for each in lost).text('.1f')}")
        print(f"work leased again after, s    {spread(each.leased_s for each in lost).text('.2f')}")


if __name__ == "__main__":
    main()
