"""A run's journal and shards, put aside while it goes, and trained again under another topology by real processes that
are started by hand; the driver's calls may be the test's own. Judges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import zmq

from launch import place
from launch.supervisor.plan import module_of
from launch.supervisor.server import child_environment
from proto.messages import Ping, Pong
from services.policy_trainer.dispatch import group_dispatch
from services.policy_trainer.driver import Driver
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared.rpc.client import Client
from shared.rundir import RunDir, service_name
from shared.topology import load
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster

POLL_S = 0.05
END_S = 30.0
DRIVER = 5
"""Incarnation of the test as a driver."""
T = TypeVar("T")


@dataclass(frozen=True)
class Recording:
    """What a later run needs to train the same batches: `journal`, and files of `shards` under the store's folder."""

    topology: Path
    journal: Path
    shards: Path
    rows: list[dict[str, float]]


def record(running: Cluster, steps: int, folder: Path) -> Recording:
    """Put aside what a cluster that keeps its tasks has done once `steps` are committed.

    The journal first: it names nothing that is not in a store yet, and stores never change a file under its name.
    """
    rows = running.wait_for(f"step {steps}", lambda: found if len(found := running.rows()) >= steps else None)
    with (
        contextlib.closing(sqlite3.connect(f"file:{running.run.journal}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as target,
    ):
        source.backup(target)
    shards = running.run.shm.with_name(f"{running.run.shm.name}-kept")
    _copy(running.run.shm, shards)
    return Recording(running.run.topology, folder / "journal.sqlite", shards, rows)


def _copy(source: Path, target: Path) -> None:
    """The same sealed files, with their times, under another folder."""
    for file in source.glob("*/*"):
        if file.is_file():
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # swept meanwhile: nothing that the journal names
                shutil.copy2(file, copied)
                if not file.exists():  # nor is it certain that its pages were its own to the end
                    copied.unlink()


class ByHand:
    """The services of a run without a launcher, each `python -m services.<name>`."""

    def __init__(self, run: RunDir, until: float) -> None:
        self.run = run
        self.topology = load(run.topology)
        self._until = until
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *services: str) -> None:
        """All instances of `services`."""
        for spec in self.topology.services_plan():
            if spec.service not in services:
                continue
            command = [sys.executable, "-m", module_of(spec.service), "--run", str(self.run.path)]
            name = f"{spec.service}-{spec.instance}"
            with (self.run.path / f"{name}.txt").open("wb") as output:
                self._processes[name] = subprocess.Popen(
                    [*command, "--instance", str(spec.instance)],
                    cwd=ROOT,
                    env=child_environment(1),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )

    def wait_for(self, what: str, answer: Callable[[], T | None]) -> T:
        """The first answer that is not None; fails once a process has ended or time is up."""
        while True:
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            found = answer()
            if found is not None:
                return found
            assert not ended, f"{what}: {ended[0]} ended, {self._said(ended[0])}"
            assert time.monotonic() < self._until, f"{what}: not in time, {self._said('policy-trainer-0')}"
            time.sleep(POLL_S)

    def _said(self, name: str) -> str:
        return (self.run.path / f"{name}.txt").read_text()[-3000:]

    def rows(self) -> list[dict[str, float]]:
        """metrics.jsonl, training steps only."""
        text = self.run.metrics.read_text() if self.run.metrics.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if row["step"] > 0]

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(END_S)


async def train_again(services: ByHand, steps: int) -> list[dict[str, float]]:
    """The rows of the first `steps` steps, trained by the driver's own code in this process from their journaled
    batches. `services`: scheduler, stores and trainer workers are started.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    clients: dict[tuple[str, int], Client] = {}

    def client(service: str, instance: int) -> Client:
        if (service, instance) not in clients:
            endpoint, name = services.run.endpoint(service, instance), service_name(service, instance)
            clients[service, instance] = Client(context, endpoint, name, DRIVER)
        return clients[service, instance]

    try:
        for spec in services.topology.services_plan():
            if spec.service in ("scheduler", "batch-store", "policy-trainer-worker"):
                await client(spec.service, spec.instance).call(Ping(), Pong, deadline_s=120)
        workers = group_dispatch(services.topology, client, DRIVER)
        scheduler = SchedulerCalls(client("scheduler", 0), DRIVER)
        await workers.take_over()
        await workers.init_model()
        await scheduler.reloaded(0)
        standing = ResumePoint(version=0, committed=steps, lineage=0, checkpoint=-1, checkpoint_now=False)
        publisher = cast(Any, None)  # nothing is published: these versions were sampled with already
        export = services.run.export
        driver = Driver(services.topology, scheduler, workers, publisher, standing, lambda _: None, export=export)
        rows = []
        for step in range(1, steps + 1):
            metrics = StepMetrics(step=step)
            batch = await scheduler.next_batch(step)
            await driver.step(batch, metrics)
            rows.append({"step": step, **metrics.row(batch, step_s=1.0)})
        return rows
    finally:
        for each in clients.values():
            each.close()
        await asyncio.to_thread(context.term)


@contextlib.contextmanager
def again(recording: Recording, path: Path, *overrides: str, limit_s: float) -> Iterator[ByHand]:
    """The recorded run as it stood, under `overrides`; no process is started yet."""
    run = place.create(path, load(recording.topology, list(overrides)))
    _copy(recording.shards, run.shm)
    run.journal.write_bytes(recording.journal.read_bytes())
    services = ByHand(run, time.monotonic() + limit_s)
    try:
        yield services
    finally:
        services.end()
        run.remove_volatile()
