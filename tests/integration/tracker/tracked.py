"""A run directory in which a test writes the metrics, and a tracker process for it. Asserts nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler.metrics_file import MetricsFile
from services.tracker import ledger
from services.tracker.ledger import Ledger
from shared.rundir import RunDir
from shared.samples.record import FOLDER, SampleRecord, file_of
from shared.topology import load
from tests.integration.tiny.harness import ROOT, wait_for
from tests.unit.shared.topology.small_topology import make, write

LIMIT_S = 180.0
Committed = tuple[int, int, float]
"""Lineage, step and loss of a row."""


@dataclass
class Tracked:
    """A run directory whose metrics are written by the scheduler's own code."""

    run: RunDir
    name: str
    environment: Mapping[str, str]
    committed: list[Committed] = field(default_factory=list)
    lineage: int = 0
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._file = MetricsFile(self.run.metrics, lambda _: [], -1, 0)

    def commit(self, *steps: int, evaluated: bool = True) -> None:
        for step in steps:
            loss = len(self.committed) / 8  # exact in 32 bits, too
            row = {"step": float(step), "loss/policy": loss, "policy/grad_norm": float("nan")}
            if evaluated:
                row["eval/held/pass@8"] = 0.5
            self._file.write(json.dumps(row))
            self.committed.append((self.lineage, step, loss))

    def rewind(self, step: int) -> None:
        self._file.discard(self.lineage, step, {})
        self.lineage += 1

    def warn(self, kind: str, text: str, step: int) -> None:
        with (self.run.path / "warnings.jsonl").open("a") as file:
            file.write(json.dumps({"at": 1.0, "step": step, "kind": kind, "text": text, "remedy": "lower lr"}) + "\n")

    def sample(self, split: str, step: int, completion: str, **fields: Any) -> None:
        """Write a sample as the recorder does."""
        path = self.run.path / FOLDER / file_of(split, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {"split": split, "step": step, "prompt": "1 | 1", "completion": completion, "length": 3} | fields
        record = SampleRecord(task=f"{split}/0/1", **fields)
        path.write_bytes(msgspec.json.encode(record) + b"\n")

    def start(self) -> None:
        """Start the tracker as a service is started by hand."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.tracker", "--run", str(self.run.path)],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self, outcome: str = "done", cause: str = "") -> None:
        """Stop the tracker as it is stopped at the end of a run."""
        assert self.process is not None
        self.run.outcome.write_text(json.dumps({"outcome": outcome, "cause": cause}))
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=LIMIT_S)
        self.process = None
        self.run.outcome.unlink()

    def ledger(self) -> Ledger:
        return ledger.read(self.run.path, self.name)

    def wait_sent(self) -> None:
        """Wait until all committed rows have been handed over."""
        wait_for("rows sent", lambda: self.ledger().sent >= len(self.committed), LIMIT_S)

    def command(self) -> subprocess.CompletedProcess[str]:
        """Send the remaining rows with the operator's command."""
        command = [sys.executable, "-m", "launch.ctl", "--run", str(self.run.path), "track"]
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )


@contextmanager
def tracked(folder: Path, name: str, section: Mapping[str, Any], **environment: str) -> Iterator[Tracked]:
    """Make a run directory in `folder` whose only tracker is `name`."""
    made = make(folder)
    overrides = [f"monitor.{name}={json.dumps(section)}", 'reward.params={"api_key": "sk-secret"}']
    overrides.append("policy.model=./model")
    run = RunDir.create(folder / "a-run", topology=load(write(made), overrides), shm_root=folder / "shm")
    here = Tracked(run, name, environment)
    try:
        yield here
    finally:
        here.kill()
        run.remove_volatile()
