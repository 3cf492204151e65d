"""Creates the directory of a new run, or reopens that of an old one. Two launchers never share a directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from launch import preflight
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.topology import Topology, load

BASE = Path("runs")
LOCK_WAIT_S = 40.0
"""Seconds within which the services of a killed launcher end under its guard and free the directory, in addition to the
time for a checkpoint that is being written."""
_POLL_S = 0.1
FIXED = (
    "run.seed",
    "run.deterministic",
    "policy",
    "data.train",
    "staleness",
    "algorithm.tasks_per_step",
    "algorithm.group_size",
)
"""Keys fixed by the journal and the checkpoints of a run, which other values would contradict."""
FIXED_BITS = (
    "data.eval",
    "reward",
    "sampling",
    "algorithm",
    "optimizer",
    "services.policy-trainer",
    "services.reference",
    "services.rollout.block_tasks",
    "services.rollout.threads",
)
"""Keys that are also fixed in deterministic mode, because the bits of the result depend on them."""


def default_path(topology: Topology) -> Path:
    """Return `runs/<name>-<UTC time>`, with a number appended if two runs begin in the same second."""
    stem = f"{topology.run.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    path = BASE / stem
    number = 2
    while path.exists():
        path = BASE / f"{stem}-{number}"
        number += 1
    return path


def resumable(topology: Topology) -> Path:
    """Return the newest run of this name under `runs/`. Raises RpcError if there is none."""
    runs = [path for path in BASE.glob(f"{topology.run.name}-*") if (path / "run.json").exists()]
    if not runs:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{BASE.absolute()}: no run of {topology.run.name!r} to resume; name it with --run-dir",
        )
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns)


def lock(path: Path, save_limit_s: float = 0.0) -> int:
    """Lock the run directory. Return the descriptor of the lock, which the guard shares, so that the lock outlives this
    process.

    Waits for the processes of a killed launcher to end, which may first have to write a checkpoint (`save_limit_s`).
    Raises RpcError: busy if another launcher or its services are alive, bad_request if the directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        own = os.open(path / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        text = f"{path}: cannot be a run directory ({error.strerror}); name another folder with --run-dir"
        raise RpcError(ErrorCode.BAD_REQUEST, text) from None
    shared = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not _try_lock(own):
        raise _in_use_error(path, "another launcher")
    until = time.monotonic() + LOCK_WAIT_S + save_limit_s
    while not _try_lock(shared):
        if time.monotonic() >= until:
            raise _in_use_error(path, "services of a launcher that was killed")
        time.sleep(_POLL_S)
    return shared


def is_held(path: Path) -> bool:
    """Return whether a launcher holds the run directory."""
    try:
        descriptor = os.open(path / "launcher.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file or directory until this process and all that inherit the descriptor have ended."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use_error(path: Path, who: str) -> RpcError:
    return RpcError(ErrorCode.BUSY, f"run directory {path.absolute()}: in use by {who}; end that first")


def create(path: Path, topology: Topology) -> RunDir:
    """Create a run directory with its resolved topology. Raises RpcError if it already holds a run."""
    run = RunDir.create(path, shm_root=preflight.shm_root(topology))
    topology.dump_resolved(run.topology)
    return run


def reopen(path: Path, topology: Topology) -> RunDir:
    """Reopen a run with new sockets and shared memory, to continue under `topology`.

    Raises RpcError(bad_request) naming the keys of `FIXED` and `FIXED_BITS` whose values differ from the original.
    """
    old = RunDir.open(path)
    begun = load(old.topology, check_supported=False).document()
    now = topology.document()
    fixed = FIXED + FIXED_BITS if topology.run.deterministic else FIXED
    differ = [key for key in fixed if _value_at(begun, key) != _value_at(now, key)]
    if differ:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"run directory {path}: was begun with other values of {', '.join(differ)}; "
            f"resume it with {old.topology}, or begin a new run",
        )
    run = RunDir.reopen(path, shm_root=preflight.shm_root(topology))
    topology.dump_resolved(run.topology)
    return run


def _value_at(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
