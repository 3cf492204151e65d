"""The run directory: the paths of one run, through which its services find each other. It holds no configuration."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from proto.messages import ErrorCode
from shared.rpc.claim import SCRATCH_BYTES
from shared.rpc.errors import RpcError
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role

MAX_IPC_PATH_BYTES = 107
CHECKPOINT_PREFIX = "step-"
SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "rlbus-"
_OWNER_LOCK = "owner.lock"
_SHM_LINK = "shm"
_TOPOLOGY = "topology.yaml"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SPILL_LINK = "spill"
ABANDONED_S = 60.0
"""Minimum age in seconds of volatile directories to sweep: a killed service may be about to restart."""


def service_name(service: str, instance: int) -> str:
    """Return the name of an instance: `("rollout", 0)` -> `"rollout/0"`."""
    return f"{service}/{instance}"


def parse_service_name(name: str) -> tuple[str, int]:
    """Split a name: `"rollout/0"` -> `("rollout", 0)`. Without a number the instance is -1, which means all.

    Raises RpcError(bad_request) for other text.
    """
    service, _, number = name.partition("/")
    if not service or (number and not number.isdigit()):
        raise RpcError(ErrorCode.BAD_REQUEST, f"service {name!r}: write NAME or NAME/INSTANCE, e.g. rollout/0")
    return service, int(number) if number else -1


def folder_id(folder: Path) -> str:
    """Return an id of the folder that does not depend on its path, and differs between folders and between hosts."""
    status = folder.stat()
    return f"{_BOOT_ID.read_text().strip()}/{status.st_dev:x}/{status.st_ino:x}"


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. `sockets` is a short private directory because ipc paths end at 107 bytes."""

    path: Path
    sockets: Path
    shm: Path
    scheduler: str = ""
    """The scheduler's tcp endpoint on a host that joined the run. Empty on the host that started it."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def topology(self) -> Path:
        return self.path / _TOPOLOGY

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def host_id(self) -> str:
        """An id that is equal in all containers and networks that share these sockets, and differs on other hosts."""
        return folder_id(self.sockets)

    def log_file(self, service: str, instance: int) -> Path:
        return self.logs / f"{service}-{instance}.jsonl"

    def endpoint(self, service: str, instance: int) -> str:
        """Return the endpoint of the mailbox of a service on this host."""
        return f"ipc://{self.sockets}/{service}-{instance}"

    def socket_file(self, service: str, instance: int) -> Path:
        return self.sockets / f"{service}-{instance}"

    @classmethod
    def create(cls, path: Path, *, shm_root: Path = SHM_ROOT) -> RunDir:
        """Create the run directory, and private directories for its sockets and shared memory.

        Raises RpcError(bad_request) if `path` already holds a run.
        """
        path = path.absolute()
        if (path / "run.json").exists():
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"run directory {path}: holds a run already; choose another or use --resume"
            )
        keys.create(path / "keys")
        return cls._write(path, shm_root)

    @classmethod
    def reopen(cls, path: Path, *, shm_root: Path = SHM_ROOT) -> RunDir:
        """Reopen a run for --resume, with its keys and new directories for sockets and shared memory."""
        old = cls.open(path)
        old.remove_volatile()
        keys.create(old.keys)
        return cls._write(old.path, shm_root, old.scheduler)

    @classmethod
    def join(cls, path: Path, access: Access, *, shm_root: Path = SHM_ROOT) -> RunDir:
        """Make `path` this host's directory of the run that `access` describes, with its own sockets and shared memory.

        Raises RpcError(bad_request) if `path` already holds a run, or the role of `access` is not service.
        """
        path = path.absolute()
        if access.role != Role.SERVICE:
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"run {access.name}: who joins needs the role service, not {access.role.label}"
            )
        if (path / "run.json").exists() or (path / "keys").exists():
            raise RpcError(ErrorCode.BAD_REQUEST, f"run directory {path}: holds a run already; choose another")
        keys.save(path / "keys", access.keys)
        (path / _TOPOLOGY).write_text(access.topology)
        return cls._write(path, shm_root, access.endpoints["scheduler"])

    @classmethod
    def _write(cls, path: Path, shm_root: Path, scheduler: str = "") -> RunDir:
        for name in ("logs", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        sockets = Path(tempfile.mkdtemp(prefix="rlbus-"))
        longest = len(os.fsencode(sockets)) + len("/policy-trainer-worker-0000") + SCRATCH_BYTES
        if longest > MAX_IPC_PATH_BYTES:
            sockets.rmdir()
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"socket directory {sockets}: {longest} bytes, ipc paths end at {MAX_IPC_PATH_BYTES}; "
                "set TMPDIR to a shorter path",
            )
        shm_root.mkdir(parents=True, exist_ok=True)
        shm = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=shm_root))
        (sockets / _SHM_LINK).symlink_to(shm)  # shows the sweep to which run the sockets belong
        run = cls(path=path, sockets=sockets, shm=shm, scheduler=scheduler)
        text = json.dumps({"run": path.name, "sockets": str(sockets), "shm": str(shm), "scheduler": scheduler})
        scratch = path / "run.json.tmp"
        scratch.write_text(text + "\n")
        scratch.replace(path / "run.json")
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Read an existing run directory. Raises RpcError(bad_request) if `path` is not one."""
        path = path.absolute()
        try:
            data = json.loads((path / "run.json").read_text())
            return cls(
                path=path,
                sockets=Path(data["sockets"]),
                shm=Path(data["shm"]),
                scheduler=str(data.get("scheduler", "")),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = "it has no run.json" if path.is_dir() else "there is no such directory"
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                why = f"its run.json cannot be read ({type(error).__name__})"
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"run directory {path}: not a run, {why}; name one under runs/, or start one with "
                "`python -m launch.cluster TOPOLOGY.yaml --run-dir ...`",
            ) from None

    def hold(self) -> int:
        """Mark the volatile directories as in use until this process dies, and return the lock's descriptor."""
        descriptor = os.open(self.shm / _OWNER_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    @property
    def spill_link(self) -> Path:
        """Symbolic link to the data that the batch stores have spilled to disk, if any."""
        return self.shm / _SPILL_LINK

    def remove_volatile(self) -> None:
        """Delete sockets, shared memory and spilled data. Existing mappings stay readable."""
        shutil.rmtree(self.sockets, ignore_errors=True)
        self.remove_shards()

    def remove_shards(self) -> None:
        """Delete shared memory and the data spilled from it."""
        _remove_shards(self.shm)


def sweep_abandoned(shm_root: Path = SHM_ROOT) -> list[Path]:
    """Delete the shared memory and sockets of runs without a living process (all were killed at once, for example).

    Returns the deleted directories. Those younger than `ABANDONED_S` stay, and so do those that cannot be recognised.
    """
    gone = [folder for folder in shm_root.glob(f"{SHM_PREFIX}*") if _past_min_age(folder) and _remove_unowned(folder)]
    for folder in Path(tempfile.gettempdir()).glob(f"{SHM_PREFIX}*"):
        link = folder / _SHM_LINK
        if link.is_symlink() and not link.exists() and _past_min_age(folder):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)
    return gone


def _remove_shards(shm: Path) -> None:
    link = shm / _SPILL_LINK
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(shm, ignore_errors=True)


def _past_min_age(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > ABANDONED_S
    except OSError:
        return False  # removed meanwhile


def _remove_unowned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _OWNER_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # being made right now, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        _remove_shards(folder)
        return True
    finally:
        os.close(descriptor)


def newest_run(base: Path) -> Path:
    """Return the run under `base` (usually `runs/`) that was started last. Raises RpcError if there is none."""
    runs = [folder for folder in base.glob("*") if (folder / "run.json").exists()]
    if not runs:
        raise RpcError(ErrorCode.BAD_REQUEST, f"{base.absolute()}: no run there; give one with --run DIR")
    return max(runs, key=lambda folder: (folder / "run.json").stat().st_mtime_ns)


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints under `folder`, ascending."""
    names = (path.name.removeprefix(CHECKPOINT_PREFIX) for path in folder.glob(f"{CHECKPOINT_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())
