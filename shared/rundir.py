"""The run directory: the paths of one run, through which its services find each other."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import ErrorCode
from shared import names
from shared.rpc.claim import SCRATCH_BYTES
from shared.rpc.errors import RpcError
from shared.security import keys
from shared.security.access import Access
from shared.security.roles import Role

if TYPE_CHECKING:
    from shared.topology import Topology

MAX_IPC_PATH_BYTES = 107
SOCKET_NAME_BYTES = 27
"""Maximum length of a socket's name, with the slash before it: `/<service>-<instance>`."""
CHECKPOINT_PREFIX = "step-"
SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "rlbus-"
UNFINISHED_PREFIX = ".rlbus-run-"
"""Prefix of the hidden name of a run directory that is still being created. Its creator holds a lock on it."""
_OWNER_LOCK = "owner.lock"
_SHM_LINK = "shm"
_TOPOLOGY = "topology.yaml"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SPILL_LINK = "spill"
_RANDOM_CHARACTERS = 8
"""Length of what `mkdtemp` appends to its prefix."""
ABANDONED_S = 60.0
"""Minimum age, in seconds, of volatile directories to sweep. Younger ones may belong to a killed service that is about
to restart."""


def service_name(service: str, instance: int) -> str:
    """Return the name of an instance: `("rollout", 0)` -> `"rollout/0"`."""
    return f"{service}/{instance}"


def parse_service_name(name: str) -> tuple[str, int]:
    """Split a name: `"rollout/0"` -> `("rollout", 0)`. Without a number the instance is -1, which means all.

    Raises RpcError(bad_request) for other text.
    """
    service, _, instance = name.partition("/")
    number = names.number(instance)
    if not service or (instance and number is None):
        raise RpcError(ErrorCode.BAD_REQUEST, f"service {name!r}: write NAME or NAME/INSTANCE, e.g. rollout/0")
    return service, -1 if number is None else number


def folder_id(folder: Path) -> str:
    """Return an id of the folder that does not depend on its path, and differs between folders and between hosts."""
    status = folder.stat()
    return f"{_BOOT_ID.read_text().strip()}/{status.st_dev:x}/{status.st_ino:x}"


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. `sockets` is a short private directory because ipc paths are limited to 107 bytes."""

    path: Path
    sockets: Path
    shm: Path
    scheduler: str = ""
    """The scheduler's tcp endpoint, on a host that joined the run. It is empty on the host that started the run."""

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
    def warnings(self) -> Path:
        return self.path / "warnings.jsonl"

    @property
    def last(self) -> Path:
        """The last states of the run's processes, written when it ends (`shared.runfiles.last`)."""
        return self.path / "last.jsonl"

    @property
    def outcome(self) -> Path:
        """`{"outcome": "done" | "stopped" | "failed", "cause": "..."}`. The file exists from the moment the run begins
        to shut down."""
        return self.path / "outcome.json"

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
    def export_best(self) -> Path:
        """The model of the best checkpoint (`checkpoint.keep_best`)."""
        return self.path / "export-best"

    @property
    def best_note(self) -> Path:
        """A JSON file in `export_best`: an object with the step, the metric and its value."""
        return self.export_best / "best.json"

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
        """Return the endpoint of a service's mailbox on this host."""
        return f"ipc://{self.sockets}/{service}-{instance}"

    def socket_file(self, service: str, instance: int) -> Path:
        return self.sockets / f"{service}-{instance}"

    @classmethod
    def create(
        cls, path: Path, *, folder: Path | None = None, topology: Topology | None = None, shm_root: Path = SHM_ROOT
    ) -> RunDir:
        """Create the run directory, and private directories for its sockets and shared memory.

        `folder`, if given, is an empty directory beside `path`. The run is made in `folder`, which is renamed to
        `path` at the end. Otherwise the run is made in `path`, which becomes a run when run.json is renamed into place
        at the end.

        Raises RpcError(bad_request) if `path` already holds a run or is not UTF-8, and OSError if there is no room for
        it.
        """
        path = run_path(path)
        check_new(path)
        keys.create((folder or path) / "keys")
        return cls._write(path, shm_root, folder=folder, topology=topology)

    @classmethod
    def reopen(cls, path: Path, *, topology: Topology | None = None, shm_root: Path = SHM_ROOT) -> RunDir:
        """Reopen a run for --resume, with its keys and new directories for sockets and shared memory.

        Raises OSError if there is no room for them. In that case the run can be reopened later.
        """
        old = cls.open(path)
        old.remove_volatile()
        keys.create(old.keys)
        return cls._write(old.path, shm_root, old.scheduler, topology=topology)

    @classmethod
    def join(cls, path: Path, access: Access, *, shm_root: Path = SHM_ROOT) -> RunDir:
        """Make `path` this host's directory for the run that `access` describes, with its own sockets and shared
        memory.

        Raises RpcError(bad_request) if `path` already holds a run or is not UTF-8, or the role of `access` is not
        service.
        """
        path = run_path(path)
        if access.role != Role.SERVICE:
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"run {access.name}: joining needs the role service, not {access.role.label}"
            )
        if (path / "run.json").exists() or (path / "keys").exists():
            raise RpcError(ErrorCode.BAD_REQUEST, f"run directory {path}: holds a run already; choose another")
        keys.save(path / "keys", access.keys)
        (path / _TOPOLOGY).write_text(access.topology)
        return cls._write(path, shm_root, access.endpoints["scheduler"])

    @classmethod
    def rejoin(cls, path: Path, access: Access, *, shm_root: Path = SHM_ROOT) -> RunDir:
        """Rejoin the run of `access` with `path`, the directory that this host used when it joined before.

        Logs and notes are kept. A path without a run is joined as usual.

        Raises RpcError(bad_request) if `path` holds another run, or processes that this host ran for it before are
        still running.
        """
        path = path.absolute()
        if not (path / "run.json").exists():
            return cls.join(path, access, shm_root=shm_root)
        old = cls.open(path)
        if not old.scheduler or keys.load(old.keys, Role.SERVICE).public != access.keys.public:
            raise RpcError(ErrorCode.BAD_REQUEST, f"run directory {path}: holds another run; choose another")
        if old.shm.exists() and not _remove_unowned(old.shm, old.shm / _OWNER_LOCK):
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"run directory {path}: its services are still running; stop them first"
            )
        old.remove_volatile()
        (path / _TOPOLOGY).write_text(access.topology)
        return cls._write(path, shm_root, access.endpoints["scheduler"])

    @classmethod
    def _write(
        cls,
        path: Path,
        shm_root: Path,
        scheduler: str = "",
        *,
        folder: Path | None = None,
        topology: Topology | None = None,
    ) -> RunDir:
        """Create the contents of the run directory, in `folder` if it is given. The rename is the last step.

        If anything fails, the directories for sockets and shared memory are removed again.
        """
        here = folder or path
        for name in ("logs", "checkpoints"):
            (here / name).mkdir(exist_ok=True)
        if topology is not None:
            topology.dump_resolved(here / _TOPOLOGY)
        shm_root.mkdir(parents=True, exist_ok=True)
        with _volatile_folders(shm_root) as (sockets, shm):
            _check_sockets(sockets)
            text = json.dumps({"run": path.name, "sockets": str(sockets), "shm": str(shm), "scheduler": scheduler})
            scratch = here / "run.json.tmp"
            scratch.write_text(text + "\n")
            scratch.replace(here / "run.json")
            if folder is not None:
                folder.rename(path)
            return cls(path=path, sockets=sockets, shm=shm, scheduler=scheduler)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Read an existing run directory. Raises RpcError(bad_request) if `path` is not a run directory."""
        path = run_path(path)
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
                f"run directory {path}: not a run: {why}; name one under runs/, or start one with "
                "`python -m launch.cluster TOPOLOGY.yaml --run-dir ...`",
            ) from None

    def hold(self) -> tuple[int, int]:
        """Mark the volatile directories as in use until this process dies or calls `release`. Return the locks.

        Each directory has a lock of its own: containers may share the temporary directory but not /dev/shm, or the
        other way round. If the shared memory was deleted during the run, it is created again, empty, because
        its data can be produced again. Deleted sockets cannot be replaced, so OSError is raised.
        """
        sockets = _locked(self.sockets / _OWNER_LOCK)
        with contextlib.suppress(FileExistsError):
            self.shm.mkdir(mode=0o700)
        if self.shm.lstat().st_uid != os.geteuid():  # anyone can create a folder in /dev/shm
            raise PermissionError(f"{self.shm}: belongs to another user; begin a new run")
        return sockets, _locked(self.shm / _OWNER_LOCK)

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


@contextlib.contextmanager
def _volatile_folders(shm_root: Path) -> Iterator[tuple[Path, Path]]:
    """Make private directories for the sockets and for the shared memory of a run, and remove them if the block fails.

    The directories stay locked during the block. Afterwards the sweep recognizes their owner by the lock file and by
    the link to the shared memory.
    """
    made: list[Path] = []
    locks: list[int] = []
    try:
        for root in (tempfile.gettempdir(), shm_root):
            made.append(Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=root)))
            locks.append(_locked(made[-1], os.O_RDONLY | os.O_DIRECTORY))
        sockets, shm = made
        locks += [_locked(folder / _OWNER_LOCK) for folder in made]
        (sockets / _SHM_LINK).symlink_to(shm)
        yield sockets, shm
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for lock in locks:
            os.close(lock)


def _locked(path: Path, flags: int = os.O_CREAT | os.O_RDWR) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def release(locks: Iterable[int]) -> None:
    """Release the locks that `RunDir.hold` returned."""
    for lock in locks:
        os.close(lock)


def sweep_abandoned(shm_root: Path = SHM_ROOT, runs: Path | None = None) -> list[Path]:
    """Delete the shared memory and sockets of runs without a living process (for example if all were killed at once),
    and the run directories under `runs` that their launcher did not finish making.

    Returns the deleted directories. Directories that a process has locked are kept, as are directories that are younger
    than `ABANDONED_S`, belong to other users, or cannot be recognized.
    """
    sockets = _old_folders(Path(tempfile.gettempdir()), SHM_PREFIX)
    linked = {folder: shm for folder in sockets if (shm := _linked(folder)) is not None}
    shards = {*_old_folders(shm_root, SHM_PREFIX), *(shm for shm in linked.values() if _is_old(shm, SHM_PREFIX))}
    gone = [folder for folder in sorted(shards) if _remove_unowned(folder, folder / _OWNER_LOCK)]
    for folder, shm in linked.items():
        if not os.path.lexists(shm) and _remove_unowned(folder, folder / _OWNER_LOCK):
            gone.append(folder)
    empty = [folder for folder in {*sockets, *shards} if _is_empty(folder)]
    unfinished = _old_folders(runs, UNFINISHED_PREFIX) if runs is not None else []
    return gone + [folder for folder in (*empty, *unfinished) if _remove_unowned(folder, folder)]


def _remove_shards(shm: Path) -> None:
    link = shm / _SPILL_LINK
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(shm, ignore_errors=True)


def _linked(sockets: Path) -> Path | None:
    """Return the shared-memory directory of the run to which `sockets` belongs, or None if there is no link to it."""
    with contextlib.suppress(OSError):
        return sockets / os.readlink(sockets / _SHM_LINK)
    return None


def _is_empty(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return not os.listdir(folder)
    return False


def _old_folders(root: Path, prefix: str) -> list[Path]:
    return [folder for folder in names.listed(root.glob(f"{prefix}*")) if _is_old(folder, prefix)]


def _is_old(folder: Path, prefix: str) -> bool:
    """Return whether `folder` is a directory that belongs to this user, has a name that begins with `prefix`, and is
    old enough to sweep."""
    try:
        status = folder.lstat()
    except OSError:
        return False  # removed meanwhile
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and folder.name.startswith(prefix)
    return own and time.time() - status.st_mtime > ABANDONED_S


def _remove_unowned(folder: Path, lock: Path) -> bool:
    """Remove `folder` unless a process holds `lock`, which is a file in `folder`, or `folder` itself while it is being
    created."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # not ours, or removed meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        _remove_shards(folder)
        return True
    finally:
        os.close(descriptor)


def run_path(path: Path) -> Path:
    """Return the absolute path of a run directory. Raises RpcError(bad_request) if it is not UTF-8: messages and pages
    contain it."""
    path = path.absolute()
    if not names.is_text(path):
        text = f"run directory {names.shown(path)}: its path is not UTF-8; use another name"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    return path


def check_new(path: Path) -> None:
    """Raise RpcError(bad_request) if no new run can be created in `path`: it holds one, or a model, whose files a run
    checks, or sockets have no room."""
    if (path / "run.json").exists():
        raise RpcError(
            ErrorCode.BAD_REQUEST, f"run directory {path}: holds a run already; choose another or use --resume"
        )
    if (path / "config.json").exists():
        raise RpcError(ErrorCode.BAD_REQUEST, f"run directory {path}: holds a model (config.json); choose another")
    _check_sockets(Path(tempfile.gettempdir(), f"{SHM_PREFIX}{'x' * _RANDOM_CHARACTERS}"))


def _check_sockets(folder: Path) -> None:
    longest = len(os.fsencode(folder)) + SOCKET_NAME_BYTES + SCRATCH_BYTES
    if longest > MAX_IPC_PATH_BYTES:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"socket directory {folder}: {longest} bytes, but ipc paths are limited to {MAX_IPC_PATH_BYTES}; "
            "set TMPDIR to a shorter path",
        )


def newest_run(base: Path) -> Path:
    """Return the training run under `base` (usually `runs/`) that was started last. Raises RpcError if there is none.

    Evaluations are named only explicitly.
    """
    runs = [folder for folder in names.listed(base.glob("[!.]*")) if (folder / "run.json").exists()]
    trained = [folder for folder in runs if not folder.name.startswith(names.EVALUATION_PREFIX)]
    if not trained:
        only = "only evaluations are there" if runs else "no run there"
        raise RpcError(ErrorCode.BAD_REQUEST, f"{base.absolute()}: {only}; give one with --run DIR")
    return max(trained, key=lambda folder: (folder / "run.json").stat().st_mtime_ns)


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints under `folder`, ascending."""
    found = (names.number(path.name.removeprefix(CHECKPOINT_PREFIX)) for path in folder.glob(f"{CHECKPOINT_PREFIX}*"))
    return sorted(step for step in found if step is not None)
