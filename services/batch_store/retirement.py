"""Removes files: renames them to zombies in order, and deletes each once no process maps it. The index has already
forgotten these files. If there is no descriptor for a file, or the disk refuses to remove it, the file remains due for
removal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

import structlog

from services.batch_store.files import StoreFiles
from services.batch_store.room import Removal, Room
from shared.os_limits import NO_DESCRIPTOR, raise_descriptor_limit

AT_ONCE, AT_ONCE_SHARE = 128, 32
"""`AT_ONCE` is the maximum number of files that are renamed, and of files that are reopened, before the next round of
deletions. The descriptor limit divided by `AT_ONCE_SHARE` is a second maximum. The smaller one applies, because a
zombie keeps a descriptor until it is deleted.
"""
ZOMBIE_SHARE = 4
"""The descriptor limit divided by this is the maximum number of open zombies. Stream mappings may use the same fraction
of the limit, and so may the connections of an endpoint (two descriptors each); the connections of the bulk port may use
a sixteenth of it. Some of the zombies beyond the maximum are opened in each round, and are closed again if they are
still mapped."""
T = TypeVar("T")


class Retirement:
    """Carries out the removals that a store's index has decided on. Use it only on the store's event loop."""

    def __init__(self, name: str, room: Room, files: StoreFiles, now: Callable[[], float]) -> None:
        """`now` returns the loop's time in seconds."""
        self._log = structlog.get_logger(name)
        self._room = room
        self._now = now
        self._files = files
        self._due: deque[Removal] = deque()
        self._closed: deque[str] = deque()
        """Zombies to open: spares that were given up, and zombies beyond `_max_open`."""
        limit = raise_descriptor_limit()
        self._max_open, self._batch = limit // ZOMBIE_SHARE, min(AT_ONCE, limit // AT_ONCE_SHARE)
        self._logged: set[str] = set()
        """Names of files whose removal failed and was logged."""

    def take(self, effects: Iterable[Removal]) -> None:
        """Retire the files that are already due, then these, as far as the free descriptors allow."""
        self._due.extend(effects)
        if self._due:
            self.settle()

    def free(self, names: Iterable[str]) -> None:
        """Delete spares that the index has given up, as far as the free descriptors allow."""
        self._closed.extend(names)
        if self._closed:
            self.settle()

    def settle(self) -> None:
        """Continue retiring the files that are due, and delete the zombies that are no longer mapped."""
        while True:
            opened = self._open(self._due, self._files.retire, attrgetter("target"))
            opened += self._open(self._closed, self._files.reopen, str)
            reaped = self._reap()
            excess = self._files.open_zombies()[self._max_open :]
            if excess or not (self._due or self._closed) or not opened + reaped:
                break
        for name in excess:
            self._files.close_zombie(name)
        self._closed.extend(excess)

    def is_due(self, source: str) -> bool:
        """Return whether a file with this name is still waiting to be renamed. Until then, the name cannot be
        reused."""
        return any(effect.source == source for effect in self._due)

    def _open(self, due: deque[T], begin: Callable[[T], None], name_of: Callable[[T], str]) -> int:
        """Begin to remove the files in `due` and return the number of successes. Files for which this fails move to the
        end of `due`."""
        count = 0
        for _ in range(min(len(due), self._batch)):
            one = due.popleft()
            try:
                begin(one)
            except FileNotFoundError as error:
                self._log.error("a file was deleted by another process", error=str(error))
                self._room.reaped(name_of(one))
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    due.appendleft(one)
                    break
                due.append(one)
                self._log_failure(name_of(one), error)
            else:
                self._logged.discard(name_of(one))
                count += 1
        return count

    def _reap(self) -> int:
        count = 0
        for name in self._files.unmapped():
            if self._room.keep(name, self._now()):
                self._files.close_zombie(name)
                continue
            try:
                self._files.delete(name)
            except OSError as error:
                self._log_failure(name, error)
                continue
            self._logged.discard(name)
            self._room.reaped(name)
            count += 1
        return count

    def _log_failure(self, name: str, error: OSError) -> None:
        if name not in self._logged:
            self._logged.add(name)
            self._log.error("a file cannot be deleted and its bytes still count as used", file=name, error=str(error))
