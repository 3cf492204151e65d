"""Copies a run's journal and shards while the run continues, and trains on them again under another topology.

The processes of the second training are real but started without a launcher; a test may make the driver's calls itself.
Asserts nothing.
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

from launch.commands import place
from launch.processes.plan import command_of
from launch.processes.programs import child_environment
from proto.messages import Ping, Pong
from services.policy_trainer.driver import Driver
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import dispatches
from shared.rpc.client import Client
from shared.rundir import RunDir, service_name
from shared.topology import load
from shared.topology.models import POLICY
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster

POLL_S = 0.05
END_S = 30.0
DRIVER = 5
"""Incarnation of the test as a driver."""
T = TypeVar("T")


@dataclass(frozen=True)
class Recording:
    """Copy of everything that a later run needs to train the same batches: the journal, and the files of the store's
    folder."""

    topology: Path
    journal: Path
    shards: Path
    rows: list[dict[str, float]]


def record(running: Cluster, steps: int, folder: Path) -> Recording:
    """Copy the journal and shards of a cluster that keeps its tasks, once `steps` steps are committed.

    The journal is copied first, because it names only shards that are already in a store, and a store never changes a
    sealed file.
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
    """Copy the sealed files, with their modification times, to another folder."""
    for file in source.glob("*/*"):
        if file.is_file():
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            # The journal does not name a file that was deleted in the meantime.
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(file, copied)
                if not file.exists():  # The file's pages may have been reused during the copy.
                    copied.unlink()


class ByHand:
    """Services of a run without a launcher, each started as `python -m services.<name>`."""

    def __init__(self, run: RunDir, until: float) -> None:
        self.run = run
        self.topology = load(run.topology)
        self._until = until
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *services: str) -> None:
        """Start all instances of `services`."""
        for spec in self.topology.services_plan():
            if spec.service not in services:
                continue
            command = [sys.executable, "-m", *command_of(spec.service), "--run", str(self.run.path)]
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
        """Return the first answer that is not None; fail once a process has exited or time is up."""
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
        """Return the training rows of metrics.jsonl."""
        text = self.run.metrics.read_text() if self.run.metrics.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if row["step"] > 0]

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(END_S)


async def train_again(services: ByHand, steps: int) -> list[dict[str, float]]:
    """Train the first `steps` journaled batches with the driver's code in this process and return their rows.

    The scheduler, stores and trainer workers of `services` are running.
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
        workers = dispatches(services.topology.trained, client, DRIVER)
        scheduler = SchedulerCalls(client("scheduler", 0), DRIVER)
        await workers.take_over()
        await workers.init_model()
        await scheduler.reloaded(0)
        standing = ResumePoint(version=0, committed=steps, lineage=0, checkpoint=-1, checkpoint_now=False)
        publisher = cast(Any, None)  # Nothing is published, because samples of these versions exist already.
        exports = {POLICY: services.run.export}
        driver = Driver(services.topology, scheduler, workers, publisher, standing, lambda _: None, exports=exports)
        rows = []
        for step in range(1, steps + 1):
            metrics = StepMetrics(step=step)
            batch = await scheduler.next_batch(step)
            await driver.step(batch, metrics)
            rows.append({"step": step, **metrics.row(batch.answer, step_s=1.0)})
        return rows
    finally:
        for each in clients.values():
            each.close()
        await asyncio.to_thread(context.term)


@contextlib.contextmanager
def again(recording: Recording, path: Path, *overrides: str, limit_s: float) -> Iterator[ByHand]:
    """Restore the recorded run under `overrides` without starting a process."""
    run = place.create(path, load(recording.topology, list(overrides)))
    _copy(recording.shards, run.shm)
    run.journal.write_bytes(recording.journal.read_bytes())
    services = ByHand(run, time.monotonic() + limit_s)
    try:
        yield services
    finally:
        services.end()
        run.remove_volatile()
