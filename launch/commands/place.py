"""Finds and creates the directories of runs. Two launchers never share a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

from launch.checks import preflight
from proto.messages import ErrorCode
from shared.names import EVALUATION_PREFIX, listed
from shared.os_limits import DISK_FULL_ERRNOS
from shared.rpc.errors import RpcError
from shared.rundir import UNFINISHED_PREFIX, RunDir
from shared.runfiles.outcome import LAUNCHER_LOCK
from shared.topology import Topology

BASE = Path("runs")
LOCK_WAIT_S = 40.0
"""Maximum time, in seconds, to wait until the guard of a killed launcher has stopped its services and the directory is
free. The time for a checkpoint that is being written is added to it."""
_POLL_S = 0.1
_MIB = 1 << 20


def default_path(topology: Topology, *, evaluates: bool = False) -> Path:
    """Return `runs/<name>-<UTC time>`, with a number appended if two runs begin in the same second.

    Evaluations have a prefix, so that they are never taken for the run to resume.
    """
    name = topology.run.name
    if evaluates and not name.startswith(EVALUATION_PREFIX):
        name = f"{EVALUATION_PREFIX}{name}"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    path = BASE / stem
    number = 2
    while path.exists():
        path = BASE / f"{stem}-{number}"
        number += 1
    return path


def resumable(topology: Topology) -> Path:
    """Return the newest run with the topology's name under `runs/`. Raises RpcError if there is no such run."""
    stem = re.compile(rf"{re.escape(topology.run.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    runs = [path for path in listed(BASE.glob("[!.]*")) if stem.fullmatch(path.name) and (path / "run.json").exists()]
    if not runs:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{BASE.absolute()}: no run of {topology.run.name!r} to resume; name it with --run-dir",
        )
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime_ns)


def lock(path: Path, save_limit_s: float = 0.0) -> int:
    """Lock the run directory. Return the lock's descriptor. The guard shares it, so that the lock outlives this
    process.

    Waits for the processes of a killed launcher to exit. They may first have to write a checkpoint (`save_limit_s`).
    Raises RpcError(busy) if another launcher or its services are alive, RpcError(bad_request) if the directory cannot
    be created, and OSError if there is no room for it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        own = os.open(path / LAUNCHER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise
        text = f"{path}: cannot be used as a run directory ({error.strerror}); name another folder with --run-dir"
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


def _try_lock(descriptor: int) -> bool:
    """Lock an open file or directory until this process and all processes that inherit the descriptor have ended.

    Return whether it could be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use_error(path: Path, who: str) -> RpcError:
    return RpcError(ErrorCode.BUSY, f"run directory {path.absolute()}: in use by {who}, which must end first")


def folder_for(path: Path) -> Path:
    """Return the folder in which to create the new run `path`: a hidden one beside it, or `path` itself if that already
    contains files."""
    with contextlib.suppress(OSError):
        if any(path.iterdir()):
            return path
    return path.absolute().parent / f"{UNFINISHED_PREFIX}{secrets.token_hex(4)}"


def create(path: Path, topology: Topology, folder: Path | None = None) -> RunDir:
    """Create a run directory with its resolved topology, in a locked `folder` from `folder_for` (default: `path`).

    Raises RpcError if `path` already contains a run, and OSError if there is no room for it.
    """
    hidden = folder if folder != path else None
    try:
        return RunDir.create(path, folder=hidden, topology=topology, shm_root=preflight.shm_root(topology))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _in_use_error(path, "another launcher") from None
        raise


def cannot_start_text(path: Path, topology: Topology, error: OSError) -> str:
    """Return one line that describes an error in a file system that a run needs when it starts.

    If one of these file systems is full, the line names the fullest, because the error of a failed write does not say
    which one it is.
    """
    text = f"run directory {path.absolute()}: cannot be started: {error.strerror or error}"
    if error.errno not in DISK_FULL_ERRNOS:
        return f"{text}{f' ({error.filename})' if error.filename else ''}; name another folder with --run-dir"
    remedies = {
        path.absolute().parent: "--run-dir",
        preflight.shm_root(topology): "services.batch-store.directory",
        Path(tempfile.gettempdir()): "TMPDIR",
    }
    rooms = {folder: os.statvfs(folder) for folder in remedies if folder.exists()}
    fullest = min(rooms, key=lambda folder: _share_left(rooms[folder]))
    room = rooms[fullest]
    return (
        f"{text}: {fullest} has {room.f_bavail * room.f_frsize / _MIB:.1f} of "
        f"{room.f_blocks * room.f_frsize / _MIB:.1f} MiB and {room.f_favail} of {room.f_files} files left; "
        f"make room there, or name another folder with {remedies[fullest]}"
    )


def _share_left(room: os.statvfs_result) -> float:
    files = room.f_favail / room.f_files if room.f_files else 1.0
    return min(room.f_bavail / max(1, room.f_blocks), files)


def is_there(run: RunDir, lock: int) -> bool:
    """Return whether the directory of the run is still the one that `lock` locks."""
    with contextlib.suppress(OSError):
        return os.path.samestat(run.path.stat(), os.fstat(lock))
    return False


def deleted_text(run: RunDir) -> str:
    return f"run directory {run.path}: was deleted or moved during its run; begin a new run"
