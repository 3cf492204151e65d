"""The files of one store: create, seal, copy, retire, delete, find again. Names are the truth that survives a kill.

`<put id>.tmp` granted, `<put id>.part` being copied to disk, `<put id>.blk` sealed (the one on disk counts, when both
places have it), `*.dead` zombie, `tombstones` one line a tombstone, appended before anything else happens. It must
never delete a file that somebody maps, nor lend its pages: a lock of the reader (or producer) says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from proto import blockfile
from proto.blockfile import HEADER_BYTES, Table
from proto.errors import WireError
from proto.ids import check_task_id
from proto.messages import ErrorCode, PutTask
from services.batch_store.room import Place, Retire, held_bytes
from shared.dataplane.mapping import lock_named
from shared.descriptors import NO_DESCRIPTOR
from shared.rpc.errors import RpcError

_TOMBSTONES = "tombstones"
_LOCK = "store.lock"
_IDENTITY = "identity"
_VERIFY_BYTES = 4 << 20
_COPY_BYTES = 16 << 20
_ENDINGS = (".tmp", ".part", ".dead", ".blk")
_ROOM = (
    (
        "memory",
        "enlarge the mount (mount -o remount,size=…, docker --shm-size) or name another folder as "
        "services.batch-store.directory",
    ),
    (
        "spill_limit",
        "delete what runs before a restart of this host left there, or name another folder as "
        "services.batch-store.spill",
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rescan met: a sealed file with its table, or (`table` None) one that must go, and why."""

    name: str
    nbytes: int
    table: Table | None
    why: str = ""
    place: Place = Place.MEMORY
    doubled: bool = False
    unreadable: bool = False
    """The disk does not give it: it is left alone for a later life."""


class StoreFiles:
    """One directory in memory, and maybe one on disk, owned by one process at a time."""

    def __init__(
        self,
        name: str,
        directory: Path,
        spill: Path | None = None,
        *,
        on_retire: Callable[[str], None] = lambda path: None,
    ) -> None:
        """`on_retire`: is told each path that a file lost. Raises RpcError(conflict): another process serves this."""
        self._name = name
        self._on_retire = on_retire
        self._directory = directory
        self._folders = [directory] if spill is None else [directory, spill]
        """By `Place`."""
        if spill is not None:
            spill.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _try_lock(self._lock):
            os.close(self._lock)
            raise RpcError(ErrorCode.CONFLICT, f"{name}: {directory} is served by another process; end that one first")
        self._journal = os.open(directory / _TOMBSTONES, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._journal_lines = 0
        self.owes_tombstones = False
        """There was no room for some: the list is not the whole until `compact` has written it."""
        self.identity = self._identify(directory / _IDENTITY)
        """Made with the directory: a store that comes up with another one has lost what was put before."""
        self._sealed_ns = 0
        self._zombies: dict[str, tuple[str, int]] = {}
        """Name -> path and our descriptor, by which we learn that nobody else has one."""
        self._shut: dict[str, str] = {}
        """Name -> path of what we have not open: spares, of which there may be more than descriptors, and zombies."""
        self._claimed: dict[str, int] = {}
        """Spare -> our descriptor while a put takes it."""

    @staticmethod
    def _identify(path: Path) -> str:
        try:
            return path.read_text()
        except FileNotFoundError:
            os.close(_replace(path, secrets.token_hex(16)))
            return path.read_text()

    def check_room(self, limits: Sequence[int]) -> None:
        """Raises RpcError(bad_request) when a mount cannot hold its limit (what is here already included).

        `limits`: bytes by `Place`.
        """
        for place, folder in enumerate(self._folders):
            mount = os.statvfs(folder)
            here = sum(held_bytes(entry.stat().st_size) for entry in os.scandir(folder))
            room = mount.f_bavail * mount.f_frsize + here
            if room < limits[place]:
                key, remedy = _ROOM[place]
                raise RpcError(
                    ErrorCode.BAD_REQUEST,
                    f"{self._name}: services.batch-store.{key} is {limits[place]} bytes, {folder.parent.parent} "
                    f"has room for {room}; lower it, {remedy}",
                )

    def has_sealed(self) -> bool:
        """Whether a former life left sealed files."""
        return any(entry.name.endswith(".blk") for folder in self._folders for entry in os.scandir(folder))

    def path(self, name: str, place: Place = Place.MEMORY) -> str:
        return str(self._folders[place] / name)

    # ---- one file

    def create(self, put_id: str, nbytes: int) -> str:
        """Make the file of a grant, sparse; returns its path."""
        path = self.path(f"{put_id}.tmp")
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def read_table(self, name: str) -> Table:
        """Header and table of a file, by reads: a torn file is a WireError, never a signal."""
        descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_table(descriptor)
        finally:
            os.close(descriptor)

    def seal(self, put_id: str) -> None:
        """Give a file its sealed name, and a time after that of every other: the order of the seals outlives us."""
        path = self.path(f"{put_id}.tmp")
        self._sealed_ns = max(time.time_ns(), self._sealed_ns + 1)
        os.utime(path, ns=(self._sealed_ns, self._sealed_ns))
        os.rename(path, self.path(f"{put_id}.blk"))

    def in_use(self, put_id: str) -> bool:
        """Does the producer of a grant still hold its lock? It does while no descriptor is left to find out."""
        try:
            descriptor = os.open(self.path(f"{put_id}.tmp"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # somebody deleted it
            return False
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return True
            raise
        try:
            return not _try_lock(descriptor)
        finally:
            os.close(descriptor)

    # ---- the spill

    def copy_to_disk(self, put_id: str) -> bool:
        """Copy a sealed file under an unfinished name, to the last byte on disk and verified. Slow: use a thread.

        It holds the lock of a reader: a file that is collected meanwhile is not cut, nor lent. False: it was collected
        before it could be opened. Raises OSError (the disk is full, or refuses) and WireError (what the disk gives back
        is not what was put); the unfinished file is gone then.
        """
        path = self.path(f"{put_id}.part", Place.DISK)
        source = lock_named(self.path(f"{put_id}.blk"), os.O_RDONLY)
        if source is None:
            return False
        try:
            target = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                _copy(source, target)
                _verify(target, _read_table(target))
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)
        return True

    def finish_copy(self, put_id: str) -> None:
        """Give the copy its sealed name: from here on a restart finds the file on disk. Raises OSError: it is gone."""
        try:
            os.rename(self.path(f"{put_id}.part", Place.DISK), self.path(f"{put_id}.blk", Place.DISK))
        except BaseException:
            self.drop_copy(put_id)
            raise

    def drop_copy(self, put_id: str) -> None:
        """Nobody wants the copy any more; nobody could have found it."""
        os.unlink(self.path(f"{put_id}.part", Place.DISK))

    # ---- zombies

    def retire(self, effect: Retire) -> None:
        """Rename: from here on nobody can find the file. Raises OSError: it has its name still, or was gone before."""
        source, target = self.path(effect.source, effect.place), self.path(effect.target, effect.place)
        self._on_retire(source)  # a mapping that is kept of it may have the last descriptor
        descriptor = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.rename(source, target)
        except BaseException:
            os.close(descriptor)
            raise
        self._on_retire(source)  # one that was made meanwhile would never go
        self._zombies[effect.target] = (target, descriptor)

    def unmapped(self) -> list[str]:
        """The zombies that nobody maps: locked from here on, each to be kept or deleted at once."""
        return [name for name, (_, descriptor) in self._zombies.items() if _try_lock(descriptor)]

    def keep(self, name: str) -> None:
        """It is a spare."""
        path, descriptor = self._zombies.pop(name)
        # A reader that had opened the old name waits for this lock, and then sees that the name is gone.
        os.close(descriptor)
        self._shut[name] = path

    def open_zombies(self) -> list[str]:
        """Those that cost a descriptor, the longest opened first."""
        return list(self._zombies)

    def shut(self, name: str) -> None:
        """Let go of the descriptor of a zombie, until `open_again`."""
        path, descriptor = self._zombies.pop(name)
        os.close(descriptor)
        self._shut[name] = path

    def open_again(self, name: str) -> None:
        """A zombie that was shut, or a spare, which is a zombie now. Raises OSError (no descriptor)."""
        try:
            descriptor = os.open(self._shut[name], os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            del self._shut[name]
            raise
        self._zombies[name] = (self._shut.pop(name), descriptor)

    def delete(self, name: str) -> None:
        """Raises OSError: it is a zombie still."""
        path, descriptor = self._zombies[name]
        try:
            _delete(path, descriptor)
        except BaseException:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # who waits for it learns that the name is gone
            raise
        os.close(descriptor)
        del self._zombies[name]

    # ---- spares

    def claim(self, name: str) -> bool:
        """Whether nobody has a spare open. True: it is locked until `reuse` or `release`."""
        descriptor = os.open(self._shut[name], os.O_RDWR | os.O_CLOEXEC)
        if _try_lock(descriptor):
            self._claimed[name] = descriptor
            return True
        os.close(descriptor)
        return False

    def reuse(self, name: str, put_id: str, nbytes: int) -> str:
        """A claimed spare becomes the file of a grant, of its size and no block file any more; returns its path.

        Raises OSError (no room for it or its name): the spare was deleted.
        """
        source, descriptor = self._shut.pop(name), self._claimed.pop(name)
        path = self.path(f"{put_id}.tmp")
        try:
            os.pwrite(descriptor, bytes(HEADER_BYTES), 0)
            os.ftruncate(descriptor, nbytes)  # what is beyond its pages is sparse, as in a new file
            os.rename(source, path)
        except BaseException:
            _delete(source, descriptor)
            raise
        finally:
            os.close(descriptor)
        return path

    def release(self, name: str) -> None:
        """Nothing came of it: a claimed spare is a spare again."""
        os.close(self._claimed.pop(name))

    # ---- tombstones

    def entomb(self, tasks: Iterable[PutTask]) -> None:
        """Append tombstones, all or none; they survive the process from here on. Raises OSError (no room): owed now."""
        lines = [f"{task.fence} {task.task_id}\n" for task in tasks]
        if not lines:
            return
        data = "".join(lines).encode()
        before = os.fstat(self._journal).st_size
        try:
            if os.write(self._journal, data) < len(data):
                os.ftruncate(self._journal, before)
                raise OSError(errno.ENOSPC, "no room for tombstones", self.path(_TOMBSTONES))
        except OSError:
            self.owes_tombstones = True
            raise
        self._journal_lines += len(lines)

    def compact(self, tombstones: dict[str, int]) -> None:
        """Rewrite the list when it lacks some, or most of its lines are out of date.

        Raises OSError: the one that is there stays, and is used.
        """
        if not self.owes_tombstones and self._journal_lines <= 2 * len(tombstones) + 4096:
            return
        lines = (f"{fence} {task_id}\n" for task_id, fence in tombstones.items())
        before = self._journal
        self._journal = _replace(self._directory / _TOMBSTONES, "".join(lines))
        os.close(before)
        self._journal_lines = len(tombstones)
        self.owes_tombstones = False

    def tombstones(self) -> list[PutTask]:
        """The list of the former life, oldest first. A torn last line was never acknowledged, and goes.

        A line that is no tombstone is left out: it must not keep the shards of the others from being served.
        """
        path = self._directory / _TOMBSTONES
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) != len(text):
            os.truncate(path, len(whole))
        found: list[PutTask] = []
        lines = whole.decode(errors="replace").split("\n")[:-1]
        for line in lines:
            fence, _, task_id = line.partition(" ")
            try:
                found.append(PutTask(check_task_id(task_id), int(fence)))
            except ValueError as error:  # WireError is one
                structlog.get_logger(self._name).error("damaged tombstone left out", line=line[:200], why=str(error))
        self._journal_lines = len(lines)
        return found

    # ---- after a restart

    def scan(self) -> list[Found]:
        """Every file of the former life, sealed ones verified to the last byte, in the order of their seals.

        Slow: use a thread.
        """
        found: list[tuple[int, Found]] = []
        spilled: set[str] = set()
        for place in (Place.DISK, Place.MEMORY)[-len(self._folders) :]:  # of a file in both, the one on disk counts
            for entry in list(os.scandir(self._folders[place])):
                if not entry.name.endswith(_ENDINGS):
                    continue
                try:
                    one = self._examine(entry.name, place, doubled=entry.name in spilled)
                except OSError as error:
                    if error.errno in NO_DESCRIPTOR:
                        raise
                    one = Found(entry.name, 0, None, str(error), place, unreadable=True)
                if place == Place.DISK and one.table is not None:
                    spilled.add(entry.name)
                found.append((entry.stat().st_mtime_ns, one))
        self._sealed_ns = max((at for at, _ in found), default=0)
        return [one for _, one in sorted(found, key=lambda pair: (pair[0], pair[1].name))]

    def _examine(self, name: str, place: Place, *, doubled: bool) -> Found:
        descriptor = os.open(self.path(name, place), os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            if not name.endswith(".blk"):
                return Found(name, nbytes, None, "not sealed", place)
            if doubled:
                return Found(name, nbytes, None, "copied to disk already", place, doubled=True)
            try:
                table = _read_table(descriptor)
                _verify(descriptor, table)
            except WireError as error:
                return Found(name, nbytes, None, str(error), place)
            return Found(name, nbytes, table, "", place)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of every descriptor; the files stay."""
        for _, descriptor in self._zombies.values():
            os.close(descriptor)
        os.close(self._journal)
        os.close(self._lock)
        self._zombies.clear()
        self._shut.clear()


def _replace(path: Path, text: str) -> int:
    """Write a small file as a whole, or leave the one that is there; returns its descriptor, for what is appended."""
    scratch = path.with_name(f"{path.name}.new")
    descriptor = os.open(scratch, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", closefd=False) as stream:
            stream.write(text)
        scratch.replace(path)
    except BaseException:
        os.close(descriptor)
        scratch.unlink(missing_ok=True)  # it has taken what room there was
        raise
    return descriptor


def _copy(source: int, target: int) -> None:
    """All of `source`, durable, with its times (the order after a restart), and read back from the disk."""
    status = os.fstat(source)
    os.posix_fallocate(target, 0, status.st_size)  # a full disk says so before the first byte
    at = 0
    while at < status.st_size:
        sent = os.sendfile(target, source, at, min(_COPY_BYTES, status.st_size - at))
        if not sent:
            raise WireError(f"block file of {status.st_size} bytes ends at {at}")
        at += sent
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.fsync(target)
    os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)


def _delete(path: str, descriptor: int) -> None:
    """Truncated first: the process that wrote a spare may have kept its mapping, which must not keep the pages."""
    os.ftruncate(descriptor, 0)
    Path(path).unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise
    return True


def _read_table(descriptor: int) -> Table:
    nbytes = os.fstat(descriptor).st_size
    header = os.pread(descriptor, HEADER_BYTES, 0)
    size = blockfile.table_bytes(header, nbytes)
    return blockfile.parse(header + os.pread(descriptor, size, HEADER_BYTES), nbytes)


def _verify(descriptor: int, table: Table) -> None:
    """Raises WireError naming the first shard whose bytes are not those that were put."""
    for index, task_id in enumerate(table.task_ids):
        for shard in table.shards(index):
            digest = xxhash.xxh3_64()
            for at in range(0, shard.nbytes, _VERIFY_BYTES):
                digest.update(os.pread(descriptor, min(_VERIFY_BYTES, shard.nbytes - at), shard.offset + at))
            if digest.intdigest() != shard.checksum:
                raise WireError(f"{task_id}#{shard.key}: checksum does not match its {shard.nbytes} bytes")
