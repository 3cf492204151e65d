"""A run's journal and shards, put aside while it goes, and trained again under another topology by real processes that
are started by hand. Judges nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launch import place
from launch.supervisor.plan import module_of
from launch.supervisor.server import child_environment
from shared.rundir import RunDir
from shared.topology import load
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster

POLL_S = 0.05
END_S = 30.0
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

    The journal first: it names nothing that is not in a store yet, and stores never change a file.
    """
    rows = running.wait_for(f"step {steps}", lambda: found if len(found := running.rows()) >= steps else None)
    with (
        contextlib.closing(sqlite3.connect(f"file:{running.run.journal}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as target,
    ):
        source.backup(target)
    shards = running.run.shm.with_name(f"{running.run.shm.name}-kept")
    _link(running.run.shm, shards)
    return Recording(running.run.topology, folder / "journal.sqlite", shards, rows)


def _link(source: Path, target: Path) -> None:
    """The same sealed files under another folder, without a byte of memory more."""
    for file in source.glob("*/*"):
        if file.is_file():
            linked = target / file.relative_to(source)
            linked.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # swept meanwhile: nothing that the journal names
                os.link(file, linked)


class ByHand:
    """The services of a run without a launcher, each `python -m services.<name>`."""

    def __init__(self, run: RunDir, until: float) -> None:
        self.run = run
        self._until = until
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for spec in load(run.topology).services_plan():
            command = [sys.executable, "-m", module_of(spec.service), "--run", str(run.path)]
            name = f"{spec.service}-{spec.instance}"
            output = (run.path / f"{name}.txt").open("wb")
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

    def replayed(self) -> list[dict[str, float]]:
        """The rows of the steps that the driver has trained again, from its log."""
        return [line for line in self.log("policy-trainer") if line["event"] == "replayed"]

    def log(self, service: str) -> list[dict[str, Any]]:
        file = self.run.log_file(service, 0)
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

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


@contextlib.contextmanager
def again(recording: Recording, path: Path, *overrides: str, limit_s: float) -> Iterator[ByHand]:
    """The recorded run from its beginning under `overrides`: its steps are replayed, then it goes on by itself."""
    run = place.create(path, load(recording.topology, list(overrides)))
    _link(recording.shards, run.shm)
    run.journal.write_bytes(recording.journal.read_bytes())
    services = ByHand(run, time.monotonic() + limit_s)
    try:
        yield services
    finally:
        services.end()
        run.remove_volatile()
