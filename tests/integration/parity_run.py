"""Deterministic runs that a test disturbs and then compares bit for bit with an undisturbed one. Asserts nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shared.rundir import checkpoint_steps
from tests.integration.damage import fenced_keys, flip_shard
from tests.integration.tiny import harness
from tests.integration.tiny.harness import QUICKSTART
from tests.integration.whole_cluster import Cluster, cluster

STEPS = 10
SMALL = (
    "run.deterministic=true",
    f"run.steps={STEPS}",
    "checkpoint.every=3",
    "data.eval.heldout={source: 'builtin:addition?split=test', every: 5, rows: 32}",
    "algorithm.tasks_per_step=16",
    "algorithm.mini_batch_tasks=8",
    "algorithm.group_size=4",
    "algorithm.loss.anchor=proximal",
    "services.rollout.block_tasks=4",
    "services.batch-store.memory=128MiB",
)
"""Settings with four blocks and two updates per step, and all kinds of shards."""
PPO = (
    *(setting for setting in SMALL if not setting.startswith("algorithm.group_size")),
    "algorithm.group_size=1",
    "algorithm.advantage={name: gae, lam: 0.95}",
    "algorithm.kl=null",
    "services.reference=null",
    "critic={optimizer: {lr: 1.0e-3}, num_iterations: 2}",
)
"""The same with a critic, which has four updates per step, and without a reference."""
REWARDED = (
    "reward.function=null",
    "reward.functions=[{function: builtin:reward_model, weight: 0.5}, {function: builtin:exact_match}]",
)
"""With `reward.model`: the rewards are the sum of a reward model's scores and of those of a function."""
_LIVE = ("time/", "throughput/", "store/", "gc/", "sync/sent")
"""Metrics that depend on the time, the machine or the route of the weights; all others depend only on the training."""
LIMIT_S = 400.0


def start(
    folder: Path, *overrides: str, small: tuple[str, ...] = SMALL, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Cluster]:
    return cluster(QUICKSTART, folder, *small, *overrides, limit_s=LIMIT_S, environment=environment)


def resume(folder: Path, *overrides: str, small: tuple[str, ...] = SMALL) -> contextlib.AbstractContextManager[Cluster]:
    """Resume the run in `folder`."""
    return cluster(QUICKSTART, folder, *small, *overrides, limit_s=LIMIT_S, resume=True)


def process_of(run: Cluster, service: str) -> int:
    """Wait for an instance of `service` and return its process id."""
    return run.wait_for(f"a process of {service}", lambda: harness.process_of(run.path, service))


def kill(run: Cluster, service: str) -> int:
    """Wait for an instance of `service`, send it SIGKILL and return its process id."""
    pid = process_of(run, service)
    os.kill(pid, signal.SIGKILL)
    return pid


@contextlib.contextmanager
def stopped(run: Cluster, service: str) -> Iterator[None]:
    """Stop an instance of `service` with SIGSTOP, and let it continue afterwards."""
    pid = process_of(run, service)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # The supervisor kills a process that is silent for too long.
            os.kill(pid, signal.SIGCONT)


def damage(run: Cluster, key: str, wanted: Callable[[str], bool]) -> str:
    """Flip a bit of the shard `key` of a training task. Return its task id, or "" if `wanted` returns false for every
    task."""
    folder = run.run.shm / "batch-store-0"
    return flip_shard(folder, key, lambda task_id: task_id.startswith("train/") and wanted(task_id))


def unread(run: Cluster) -> Callable[[str], bool]:
    """Return a predicate that is true for tasks that have been scored but are not yet in any step.

    A worker that is stopped in the meantime has not read the shards of such a task, and the reference has finished with
    them. So no process can be between verifying such a shard and using it, when a flipped bit would go undetected.
    """
    journaled = {task_id for _, names in run.journaled_steps().values() for task_id in names}
    fences: dict[str, dict[str, int]] = {"token_ids": {}, "ref_logprobs": {}}
    for task_id, fence, key in fenced_keys(run.run.shm / "batch-store-0"):
        if key in fences:
            fences[key][task_id] = max(fence, fences[key].get(task_id, 0))
    scored = {task_id for task_id, fence in fences["ref_logprobs"].items() if fences["token_ids"].get(task_id) == fence}
    return lambda task_id: task_id in scored - journaled


def losses(run: Cluster) -> int:
    """Return the number of times that the scheduler has learned of lost shards."""
    return sum(line["event"] == "shards lost" for line in run.log("scheduler"))


def forks(run: Cluster) -> Counter[str]:
    """Return, for each service, the number of its processes that were forked from a spare."""
    log = [json.loads(line) for line in run.run.log_file("supervisor", 0).read_text().splitlines()]
    return Counter(line["name"].partition("/")[0] for line in log if line["event"] == "spare forked")


def committed(run: Cluster, step: int) -> bool:
    """Return whether the row of `step` has been written."""
    rows = run.rows()
    return bool(rows) and rows[-1]["step"] >= step


def bits(path: Path) -> dict[str, bytes]:
    """Return the bits that a finished run leaves behind: of each trained model the exported weights, and the last
    checkpoint's weights, optimizer state and earlier versions.
    """
    last = f"step-{max(checkpoint_steps(path / 'checkpoints'))}"
    patterns = ("export*/**/*.safetensors", f"checkpoints/**/{last}/*.safetensors")
    files = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def trained_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl without values that depend on time or on the machine."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(_LIVE)} for row in rows]


def differences(one: Path, other: Path) -> list[str]:
    """Return the places where two finished runs differ, or [] if their training is identical."""
    bits_of_one, bits_of_other = bits(one), bits(other)
    names = sorted(bits_of_one.keys() | bits_of_other.keys())
    found = [name for name in names if bits_of_one.get(name) != bits_of_other.get(name)]
    rows, others = trained_rows(one), trained_rows(other)
    if len(rows) != len(others):
        found.append(f"{len(rows)} rows and {len(others)}")
    for row, again in zip(rows, others, strict=False):
        keys = sorted(key for key in row.keys() | again.keys() if row.get(key) != again.get(key))
        found += [f"step {row['step']}: {key}: {row.get(key)} and {again.get(key)}" for key in keys]
    return found
