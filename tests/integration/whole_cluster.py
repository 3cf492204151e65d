"""A whole run of `launch.cluster` with real services that a test observes and disturbs. Asserts nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from proto import blockfile
from proto.tensors import Array
from shared.rundir import RunDir
from tests.integration import warm
from tests.integration.forks import Fork
from tests.integration.tiny.harness import ROOT, status_of

POLL_S = 0.05
T = TypeVar("T")


@dataclass
class Cluster:
    """A launcher, its run directory, and the deadline of the test (monotonic seconds)."""

    process: subprocess.Popen[bytes] | Fork
    path: Path
    until: float

    @property
    def run(self) -> RunDir:
        return RunDir.open(self.path)

    def wait_for(self, what: str, answer: Callable[[], T | None]) -> T:
        """Return the first answer that is neither None nor False; fail once the launcher is gone or time is up."""
        while True:
            # This is checked first, so that the launcher's last action is not missed.
            ended = self.process.poll() is not None
            found = answer()
            if found is not None and found is not False:
                return found
            assert not ended, f"{what}: the run ended first, {self.output()}"
            assert time.monotonic() < self.until, f"{what}: not in time, {self.output()}"
            time.sleep(POLL_S)

    def end(self) -> int:
        """Wait for the run to end and return the exit status."""
        return self.wait_for("end of the run", lambda: None if self.process.poll() is None else (self.process.poll(),))[
            0
        ]

    def output(self) -> str:
        return (self.path / "cluster.out").read_text()[-3000:]

    def rows(self) -> list[dict[str, float]]:
        """Return the training rows of metrics.jsonl written so far."""
        if not (self.path / "metrics.jsonl").exists():
            return []
        text = (self.path / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if row["step"] > 0]

    def journaled_steps(self) -> dict[int, tuple[str, list[str]]]:
        """Return the state and task ids of every step in the scheduler's journal."""
        with contextlib.closing(sqlite3.connect(f"file:{self.run.journal}?mode=ro", uri=True)) as journal:
            found = journal.execute("SELECT step, state, task_ids FROM steps").fetchall()
        return {step: (state, json.loads(ids)) for step, state, ids in found}

    def status(self) -> dict[str, Any]:
        """Return the output of `ctl status --json`, or {} while the run does not answer."""
        return status_of(self.path)

    def pid(self, service: str) -> int | None:
        """Return the pid of instance 0 of a service, or None if it is not READY."""
        for row in self.status().get("services", []):
            if row["service"] == service and row["state"] == "READY":
                return int(row["pid"])
        return None

    def log(self, service: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.log_file(service, 0).read_text().splitlines()]

    def newest_weights(self) -> Path:
        """Return the file with the newest version in the store's shared memory."""
        found: dict[int, Path] = {}
        for file in self.run.shm.glob("*/*.blk"):
            with contextlib.suppress(FileNotFoundError, blockfile.WireError):
                data = file.read_bytes()
                for task_id in blockfile.parse(data, len(data)).task_ids:
                    if task_id.startswith("weights/"):
                        found[int(task_id.rsplit("/", 1)[1])] = file
        return found[max(found)]


def first_matrix(file: Path) -> tuple[int, Array]:
    """Return the offset and the values of the first two-dimensional parameter in a weights file."""
    data = file.read_bytes()
    shard = next(each for each in blockfile.parse(data, len(data)).shards(0) if len(each.shape) == 2)
    return shard.offset, np.frombuffer(data, np.float32, shard.nbytes // 4, shard.offset).copy()


def overwrite(file: Path, offset: int, values: Array) -> None:
    """Write `values` in place, keeping the inode, into a file that other processes have mapped."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(values.tobytes())


@contextlib.contextmanager
def cluster(
    topology: Path,
    folder: Path,
    *overrides: str,
    limit_s: float,
    resume: bool = False,
    calls: bool = True,
    launcher: str = "launch.cluster",
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[Cluster]:
    """Run `topology`, or resume the run in `folder`; kill all remaining processes at the end.

    Unless `calls`, reward functions are not called before the run starts. `launcher` is the module that launches the
    run, in the folder `cwd`, and `environment` is added to this process's environment variables. Without it, the
    launcher gets a spare from this session (`tests.integration.warm`).
    """
    path = folder / "run"
    path.mkdir(parents=True, exist_ok=resume)
    command = [launcher, str(topology), "--run-dir", str(path)]
    command += ["--resume"] * resume + ["--no-call"] * (not calls)
    for override in overrides:
        command += ["--set", override]
    variables = {**os.environ, **(environment or {})}
    process: subprocess.Popen[bytes] | Fork
    with (path / "cluster.out").open("wb") as output:
        # Variables may change how Python or the loader starts a process, which a fork does not show.
        if environment or "LD_PRELOAD" in variables or "run.spares=false" in overrides:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            process = warm.started(command, variables, output, cwd)
    try:
        yield Cluster(process, path, time.monotonic() + limit_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
