"""Every file below a run directory is in the table of docs/architecture.md, and within the size that the table states.

The rewards of the run print much, and so does a program that they start.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import pytest

from shared.bounded_file import HEAD_BYTES, LIMIT_BYTES, head_of
from shared.rundir import RunDir, checkpoint_steps
from shared.runfiles.logs import last_lines
from shared.runfiles.metrics import MetricsFollower
from tests.integration.tiny.harness import QUICKSTART, ROOT, ctl, environment, processes_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT_S = 400.0
KIB, MIB = 1 << 10, 1 << 20
SAMPLES_BYTES = TRACE_BYTES = 64 * KIB
OVERSHOOT_BYTES = 256 * MIB
"""Allowance for what is printed before the guard, on a busy machine, looks at a file."""
MODEL_BYTES = sum(path.stat().st_size for path in (QUICKSTART.parent / "models" / "tiny-qwen3").iterdir())
ROW_BYTES = 4 * KIB
"""Upper bound of a row of metrics in this run."""
BOUNDS: Mapping[str, int] = {
    "run.json": 4 * KIB,
    "topology.yaml": 64 * KIB,
    "launcher.lock": 0,
    "inputs.json": MIB,
    "outcome.json": 4 * KIB,
    "last.jsonl": 16 * MIB,
    "keys/*": 4 * KIB,
    "logs/*-*.jsonl": LIMIT_BYTES,
    "logs/*.out": LIMIT_BYTES,
    "metrics.jsonl": ROW_BYTES,
    "metrics.discarded.jsonl": ROW_BYTES,
    "warnings.jsonl": 9 * KIB * 20 * 18,
    "samples/*": SAMPLES_BYTES,
    "journal.sqlite": 16 * MIB,
    "journal.sqlite-wal": 16 * MIB,
    "journal.sqlite-shm": MIB,
    "journal.sqlite-mark": KIB,
    "checkpoints/*": 4 * 3 * MODEL_BYTES,
    "export/*": MODEL_BYTES + MIB,
    "export-best/*": MODEL_BYTES + MIB,
    "export-critic/*": MODEL_BYTES + MIB,
    "model/*": 0,
    "partial/*": MIB,
    "offloaded/*": 8 * MODEL_BYTES,
    "traces/*": TRACE_BYTES,
    "trackers/*": 2 * MIB,
    "tensorboard/*": MIB,
    "report.html": 2 * MIB,
    "files/*": 0,
    "hosts/*": 0,
}
"""The largest size, in bytes, of all files of each row of the table together, in this run."""
PER_FILE = ("logs/*-*.jsonl", "logs/*.out", "keys/*")
PER_ROW = ("metrics.jsonl", "metrics.discarded.jsonl")
UNFINISHED = re.compile(r"^\.?(.*?)(\.\d+)?\.(partial|replaced|removed|tmp)$")
"""The name that a file or folder has while it is being written or removed."""
SETTINGS = (
    "algorithm.tasks_per_step=4",
    "algorithm.group_size=4",
    "staleness=0",
    'data.eval.heldout={source: "builtin:addition?split=test", every: 2, rows: 8}',
    'reward={function: "loud:loud"}',
    "placement.colocate=[policy-trainer, reference, rollout]",
    "services.rollout.partial_s=0.1",
    "services.batch-store.memory=64MiB",
    f"monitor.samples={{every: 1, per_step: 4, limit_bytes: {SAMPLES_BYTES}}}",
    "monitor.tensorboard={}",
    "monitor.wandb={project: p, mode: offline}",
    "checkpoint={every: 2, keep_last: 1, keep_every: 1000, keep_best: eval/heldout/accuracy}",
)
CALL_BYTES = 1_500_000
REWARD = """
import subprocess

def loud(sample):
    print("x" * 1_000_000)
    subprocess.run(["sh", "-c", "yes | head -c 500000"])
    print("the last line of a call", flush=True)
    with open({calls!r}, "ab") as file:
        file.write(b".")
    return float(len(sample.token_ids) % 2)
"""


def sizes(run: RunDir) -> dict[str, int]:
    """Return the number of bytes by row of the table. Every file of the run must have a row."""
    found = dict.fromkeys(BOUNDS, 0)
    for folder, _, names in os.walk(run.path):
        for path in (Path(folder) / name for name in names):
            own = "/".join(UNFINISHED.sub(r"\1", part) for part in path.relative_to(run.path).parts)
            fitting = [pattern for pattern in BOUNDS if fnmatchcase(own, pattern)]
            assert len(fitting) == 1, f"{own} has {len(fitting)} rows in the table"
            with contextlib.suppress(FileNotFoundError):  # it was removed in the meantime
                size, row = path.stat().st_size, fitting[0]
                found[row] = max(found[row], size) if row in PER_FILE else found[row] + size
    return found


def bounded(run: RunDir) -> dict[str, int]:
    """Do the same, and check that every row is within its bound."""
    found = sizes(run)
    for row, nbytes in found.items():
        count = (run.path / row).read_bytes().count(b"\n") if row in PER_ROW and nbytes else 1
        assert nbytes <= count * BOUNDS[row], row
    return found


def rows(run: RunDir) -> list[int]:
    return [int(row["step"] or 0) for row in MetricsFollower(run.metrics).poll().rows]


def command(path: Path, *arguments: str) -> list[str]:
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    return [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *sets, *arguments]


def test_the_documentation_has_a_row_for_every_pattern() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## A run directory")[2]
    paths = [
        path
        for line in text.splitlines()
        if line.startswith("| `")
        for path in re.findall("`([^`]+)`", line.split("|")[1])
    ]
    patterns = {re.sub(r"<[^>]+>", "*", f"{path}*" if path.endswith("/") else path) for path in paths}
    assert patterns == set(BOUNDS)


@pytest.mark.long
def test_every_file_of_a_run_stays_within_its_bound_while_rewards_print_much(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "loud.py").write_text(REWARD.format(calls=str(calls)))
    variables = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    path = tmp_path / "run"
    output = path / "logs" / "rollout-0.out"
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, output.stat().st_size if output.exists() else 0)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        detached = command(path, "--detach")
        assert subprocess.run(detached, env=variables, cwd=ROOT, timeout=LIMIT_S, check=False).returncode == 0
        run = RunDir.open(path)
        wait_for("a checkpoint", lambda: checkpoint_steps(run.checkpoints), LIMIT_S)
        wait_for("a step after it", lambda: rows(run)[-1] > checkpoint_steps(run.checkpoints)[-1], LIMIT_S)
        live = sizes(run)
        [supervisor] = [pid for pid in processes_of(path) if "launch.cluster" in psutil.Process(pid).cmdline()]
        os.kill(supervisor, signal.SIGKILL)
        wait_for("no process left", lambda: not processes_of(path), LIMIT_S)
        killed = bounded(run)
        last = rows(run)[-1] + 2
        resumed = command(path, "--resume", "--set", f"run.steps={last}")
        resumed += ["--set", f"monitor.traces={{file_limit: {TRACE_BYTES}}}"]
        assert subprocess.run(resumed, env=variables, cwd=ROOT, timeout=LIMIT_S, check=False).returncode == 0
    finally:
        for pid in processes_of(path):
            os.kill(pid, signal.SIGKILL)
        ended.set()
        watching.join()
    assert ctl(path, "report").returncode == 0  # the launcher may not have had the time to write it
    unseen = {row for row, nbytes in bounded(run).items() if not nbytes + killed[row] + live[row]}
    elsewhere = {"launcher.lock", "model/*", "files/*", "hosts/*", "partial/*", "warnings.jsonl", "export-critic/*"}
    assert unseen <= elsewhere
    assert peak <= LIMIT_BYTES + OVERSHOOT_BYTES
    printed = calls.stat().st_size * CALL_BYTES
    with output.open("rb") as file:
        dropped = head_of(file.fileno()).dropped_bytes
    assert 0.9 * printed < dropped + output.stat().st_size - HEAD_BYTES < 1.1 * printed
    assert last_lines(run, ("rollout", 0), 5)[-1] == "the last line of a call"
    assert "STOPPED" in ctl(path, "logs", "rollout/0").stdout
