"""Creates, seals, copies, retires, deletes and recovers the files of a store. Only a file's name records its state.

`<put id>.tmp` is a granted file, `<put id>.part` one that is being copied to disk, `<put id>.blk` a sealed one (if a
file is both in memory and on disk, the copy on disk is the valid one), and `*.dead` a zombie. A file that a reader or
producer has locked is never deleted, and its pages are never lent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from proto import blockfile
from proto.blockfile import HEADER_BYTES, Table
from proto.errors import WireError
from proto.messages import ErrorCode
from services.batch_store.room import Removal, Tier, held_bytes
from services.batch_store.tombstones import TombstoneList, replace
from shared.dataplane.mapping import lock_named
from shared.os_limits import NO_DESCRIPTOR
from shared.rpc.errors import BadInput, RpcError

_LOCK = "store.lock"
_IDENTITY = "identity"
_VERIFY_BYTES = 4 << 20
_COPY_BYTES = 16 << 20
_SUFFIXES = (".tmp", ".part", ".dead", ".blk")
_REMEDIES = (
    (
        "memory",
        "enlarge the mount (mount -o remount,size=…, docker --shm-size) or name another folder as "
        "services.batch-store.directory",
    ),
    (
        "spill_limit",
        "delete what earlier runs left there before this host restarted, or name another folder as "
        "services.batch-store.spill",
    ),
)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file found by a scan. Without a `table`, it is to be retired for the reason `why`; otherwise it is sealed."""

    name: str
    nbytes: int
    table: Table | None
    why: str = ""
    place: Tier = Tier.MEMORY
    duplicate: bool = False
    unreadable: bool = False
    """Whether reading the file from the disk failed. Such a file is left in place for a later incarnation."""


class StoreFiles:
    """One directory in memory, and optionally one on disk, owned by one process at a time."""

    def __init__(
        self,
        name: str,
        directory: Path,
        spill: Path | None = None,
        *,
        on_retire: Callable[[str], None] = lambda path: None,
    ) -> None:
        """`on_retire` is called with the former path of each retired file. Raises RpcError(conflict) if another process
        serves `directory`."""
        self._name = name
        self._on_retire = on_retire
        self._directory = directory
        self._folders = [directory] if spill is None else [directory, spill]
        """Indexed by `Tier`."""
        if spill is not None:
            spill.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _try_lock(self._lock):
            os.close(self._lock)
            raise RpcError(
                ErrorCode.CONFLICT, f"{name}: {directory} is served by another process; stop that process first"
            )
        self.tombstones = TombstoneList(name, directory / "tombstones")
        self.identity = self._load_identity(directory / _IDENTITY)
        """Identifier created with the directory. A store that restarts with a different one has lost its shards."""
        self._sealed_ns = 0
        self._zombies: dict[str, tuple[str, int]] = {}
        """Name -> path and an open descriptor, whose lock shows whether another process still maps the file."""
        self._closed: dict[str, str] = {}
        """Name -> path of spares and zombies without an open descriptor. There may be more spares than descriptors."""
        self._claimed: dict[str, int] = {}
        """Spare -> open descriptor, from `claim` until `reuse` or `release`."""

    @staticmethod
    def _load_identity(path: Path) -> str:
        try:
            return path.read_text()
        except FileNotFoundError:
            os.close(replace(path, secrets.token_hex(16)))
            return path.read_text()

    def check_room(self, limits: Sequence[int]) -> None:
        """Raise RpcError if a mount has no room for its limit, including the files that it already holds: BadInput if
        the whole mount is smaller.

        `limits` are in bytes, indexed by `Tier`.
        """
        for place, folder in enumerate(self._folders):
            mount = os.statvfs(folder)
            here = sum(held_bytes(entry.stat().st_size) for entry in os.scandir(folder))
            room = mount.f_bavail * mount.f_frsize + here
            if room < limits[place]:
                key, remedy = _REMEDIES[place]
                text = (
                    f"{self._name}: services.batch-store.{key} is {limits[place]} bytes, but {folder.parent.parent} "
                    f"has room for {room}; lower the limit, {remedy}"
                )
                # Other processes may free room, but do not enlarge the mount.
                too_small = mount.f_blocks * mount.f_frsize < limits[place]
                raise BadInput(text) if too_small else RpcError(ErrorCode.BUSY, text)

    def check_exists(self) -> None:
        """Raise RpcError(internal) if the directory in memory has been deleted."""
        if os.fstat(self._lock).st_nlink == 0:
            raise RpcError(
                ErrorCode.INTERNAL,
                f"{self._name}: {self._directory} was deleted during the run; the store starts again without its data",
            )

    def has_sealed(self) -> bool:
        """Return whether an earlier incarnation left sealed files."""
        return any(entry.name.endswith(".blk") for folder in self._folders for entry in os.scandir(folder))

    def path(self, name: str, place: Tier = Tier.MEMORY) -> str:
        return str(self._folders[place] / name)

    # ---- one file

    def create(self, put_id: str, nbytes: int) -> str:
        """Create the sparse file of a grant and return its path."""
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
        """Read and check the header and table of a file. Raises WireError for a torn file.

        The file is read, not mapped, because access to a mapping of a torn file would raise SIGBUS.
        """
        descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_table(descriptor)
        finally:
            os.close(descriptor)

    def damaged(self, put_id: str, place: Tier, tasks: Sequence[int]) -> list[int] | None:
        """Return which of these tasks (indices in a sealed file) are damaged, or None if the whole file is lost.

        This is slow: call it on a worker thread. A file that was collected in the meantime counts as lost.
        """
        descriptor = lock_named(self.path(f"{put_id}.blk", place), os.O_RDONLY)
        if descriptor is None:
            return None
        try:
            table = _read_table(descriptor)
            return [index for index in tasks if _damage(descriptor, table, index)]
        except (WireError, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
                raise
            return None
        finally:
            os.close(descriptor)

    def seal(self, put_id: str) -> None:
        """Rename a file to its sealed name. Its mtime is set later than that of any other file, to record the order."""
        path = self.path(f"{put_id}.tmp")
        self._sealed_ns = max(time.time_ns(), self._sealed_ns + 1)
        os.utime(path, ns=(self._sealed_ns, self._sealed_ns))
        os.rename(path, self.path(f"{put_id}.blk"))

    def in_use(self, put_id: str) -> bool:
        """Return whether the producer of a grant holds its lock. Also returns True if no descriptor is left for the
        check."""
        try:
            descriptor = os.open(self.path(f"{put_id}.tmp"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # deleted by another process
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
        """Copy a sealed file to disk under the name of an unfinished file, then sync and verify the copy. This is slow:
        call it on a worker thread.

        The copy holds a reader's lock, so a file collected in the meantime is neither truncated nor lent. Returns False
        if the file was collected before it could be opened. Raises OSError if the disk is full or fails, and WireError
        if the bytes read back differ from those put. The unfinished file is removed in both cases.
        """
        path = self.path(f"{put_id}.part", Tier.DISK)
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
        """Rename the copy to its sealed name, under which a restart finds it. If this raises OSError, the copy is
        removed."""
        try:
            os.rename(self.path(f"{put_id}.part", Tier.DISK), self.path(f"{put_id}.blk", Tier.DISK))
        except BaseException:
            self.drop_copy(put_id)
            raise

    def drop_copy(self, put_id: str) -> None:
        """Delete a copy that is no longer needed. Its name is that of an unfinished file, so no reader has it open."""
        os.unlink(self.path(f"{put_id}.part", Tier.DISK))

    # ---- zombies

    def retire(self, effect: Removal) -> None:
        """Rename a file so that no reader finds it. Raises OSError if the file keeps its name or no longer exists."""
        source, target = self.path(effect.source, effect.place), self.path(effect.target, effect.place)
        self._on_retire(source)  # a cached mapping of the file may occupy the last descriptor
        descriptor = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.rename(source, target)
        except BaseException:
            os.close(descriptor)
            raise
        self._on_retire(source)  # a mapping created since the first call would otherwise never be closed
        self._zombies[effect.target] = (target, descriptor)

    def unmapped(self) -> list[str]:
        """Lock and return the zombies that no process maps. The caller must `close_zombie` or `delete` each at once."""
        return [name for name, (_, descriptor) in self._zombies.items() if _try_lock(descriptor)]

    def open_zombies(self) -> list[str]:
        """Return the zombies that have an open descriptor, in the order in which they were opened."""
        return list(self._zombies)

    def close_zombie(self, name: str) -> None:
        """Close the descriptor of a zombie, which may be a spare from now on, until `reopen`."""
        path, descriptor = self._zombies.pop(name)
        # A reader that opened the old name waits for this lock, and then sees that the name no longer exists.
        os.close(descriptor)
        self._closed[name] = path

    def reopen(self, name: str) -> None:
        """Reopen a closed zombie, or a spare, which becomes a zombie. Raises OSError if no descriptor is left or
        the file no longer exists."""
        try:
            descriptor = os.open(self._closed[name], os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            del self._closed[name]
            raise
        self._zombies[name] = (self._closed.pop(name), descriptor)

    def delete(self, name: str) -> None:
        """Delete a zombie. If this raises OSError, the file remains a zombie."""
        path, descriptor = self._zombies[name]
        try:
            _delete(path, descriptor)
        except BaseException:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a waiting reader then sees that the name is gone
            raise
        os.close(descriptor)
        del self._zombies[name]

    # ---- spares

    def claim(self, name: str) -> bool:
        """Lock a spare until `reuse` or `release`. Returns False if another process has it open."""
        descriptor = os.open(self._closed[name], os.O_RDWR | os.O_CLOEXEC)
        if _try_lock(descriptor):
            self._claimed[name] = descriptor
            return True
        os.close(descriptor)
        return False

    def reuse(self, name: str, put_id: str, nbytes: int) -> str:
        """Turn a claimed spare into the file of a grant and return its path.

        The file gets the size of the grant and loses its header. Raises OSError if there is no room for the file or its
        name; the spare is then deleted.
        """
        source, descriptor = self._closed.pop(name), self._claimed.pop(name)
        path = self.path(f"{put_id}.tmp")
        try:
            os.pwrite(descriptor, bytes(HEADER_BYTES), 0)
            os.ftruncate(descriptor, nbytes)  # bytes beyond its pages are sparse, as in a new file
            os.rename(source, path)
        except BaseException:
            _delete(source, descriptor)
            raise
        finally:
            os.close(descriptor)
        return path

    def release(self, name: str) -> None:
        """Unlock a claimed spare that was not used."""
        os.close(self._claimed.pop(name))

    # ---- after a restart

    def scan(self) -> list[Leftover]:
        """Return every file that earlier incarnations left, in seal order. All bytes of sealed files are verified.

        This is slow: call it on a worker thread.
        """
        scanned: list[tuple[int, Leftover]] = []
        spilled: set[str] = set()
        for place in (Tier.DISK, Tier.MEMORY)[-len(self._folders) :]:  # a copy on disk takes precedence
            for entry in list(os.scandir(self._folders[place])):
                if not entry.name.endswith(_SUFFIXES):
                    continue
                try:
                    one = self._examine(entry.name, place, duplicate=entry.name in spilled)
                except OSError as error:
                    if error.errno in NO_DESCRIPTOR:
                        raise
                    one = Leftover(entry.name, 0, None, str(error), place, unreadable=True)
                if place == Tier.DISK and one.table is not None:
                    spilled.add(entry.name)
                scanned.append((entry.stat().st_mtime_ns, one))
        self._sealed_ns = max((at for at, _ in scanned), default=0)
        return [one for _, one in sorted(scanned, key=lambda pair: (pair[0], pair[1].name))]

    def _examine(self, name: str, place: Tier, *, duplicate: bool) -> Leftover:
        descriptor = os.open(self.path(name, place), os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            if not name.endswith(".blk"):
                return Leftover(name, nbytes, None, "not sealed", place)
            if duplicate:
                return Leftover(name, nbytes, None, "already copied to disk", place, duplicate=True)
            try:
                table = _read_table(descriptor)
                _verify(descriptor, table)
            except WireError as error:
                return Leftover(name, nbytes, None, str(error), place)
            return Leftover(name, nbytes, table, "", place)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close every descriptor. The files are kept."""
        for _, descriptor in self._zombies.values():
            os.close(descriptor)
        self.tombstones.close()
        os.close(self._lock)
        self._zombies.clear()
        self._closed.clear()


def _copy(source: int, target: int) -> None:
    """Copy `source` durably with its timestamps, which give the order of the files after a restart. Later reads come
    from the disk, not from the page cache."""
    status = os.fstat(source)
    os.posix_fallocate(target, 0, status.st_size)  # raises before the first byte if the disk is full
    at = 0
    while at < status.st_size:
        sent = os.sendfile(target, source, at, min(_COPY_BYTES, status.st_size - at))
        if not sent:
            raise WireError(f"block file of {status.st_size} bytes ends at byte {at}")
        at += sent
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.fsync(target)
    os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)


def _delete(path: str, descriptor: int) -> None:
    """Truncate and unlink a file. Truncation frees the pages even if the producer of a spare still maps the file."""
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
    """Raise WireError naming the first shard whose bytes differ from those put."""
    for index in range(len(table.task_ids)):
        damage = _damage(descriptor, table, index)
        if damage:
            raise WireError(damage)


def _damage(descriptor: int, table: Table, task: int) -> str:
    """Return a message naming a shard of the task whose bytes differ from those that were put, or an empty string if
    there is none."""
    for shard in table.shards(task):
        digest = xxhash.xxh3_64()
        for at in range(0, shard.nbytes, _VERIFY_BYTES):
            digest.update(os.pread(descriptor, min(_VERIFY_BYTES, shard.nbytes - at), shard.offset + at))
        if digest.intdigest() != shard.checksum:
            return f"{table.task_ids[task]}#{shard.key}: checksum does not match its {shard.nbytes} bytes"
    return ""
