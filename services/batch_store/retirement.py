"""Files on their way out: hidden under a zombie's name in order, deleted when nobody maps them. It must never lose one:
the index has let go of it already, so what finds no descriptor, or is refused by the disk, stays due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from services.batch_store.files import StoreFiles
from services.batch_store.room import Retire
from services.batch_store.state import StoreState
from shared.descriptors import NO_DESCRIPTOR, raise_descriptor_limit

AT_ONCE, AT_ONCE_SHARE = 128, 32
"""Each zombie keeps a descriptor until it is deleted: after so many of either sort, or the limit on descriptors by the
share, those that nobody maps are."""
ZOMBIE_SHARE = 4
"""At most the limit on descriptors by this. Streams' mappings have as much, the connections of an endpoint, two each,
too, and those of the bulk port a sixteenth: the rest is everybody's. Of the zombies past it some are opened each time,
and closed again if somebody maps them."""
T = TypeVar("T")


class Retirement:
    """Carries out what the index of one store decided; belongs to the store's event loop."""

    def __init__(self, name: str, index: StoreState, files: StoreFiles, now: Callable[[], float]) -> None:
        """`now`: the loop's time in seconds."""
        self._log = structlog.get_logger(name)
        self._index = index
        self._now = now
        self._files = files
        self._due: deque[Retire] = deque()
        self._shut: deque[str] = deque()
        """Zombies to be opened: spares that were given up, and those past `most_open`."""
        limit = raise_descriptor_limit()
        self._most_open, self._at_once = limit // ZOMBIE_SHARE, min(AT_ONCE, limit // AT_ONCE_SHARE)
        self._refused: set[str] = set()
        """What the disk refused to let go, and was said already."""

    def take(self, effects: Iterable[Retire]) -> None:
        """Retire these after what is still due, as far as descriptors go."""
        self._due.extend(effects)
        if self._due:
            self.settle()

    def free(self, names: Iterable[str]) -> None:
        """Delete these, which the index has given up as spares, as far as descriptors go."""
        self._shut.extend(names)
        if self._shut:
            self.settle()

    def settle(self) -> None:
        """Go on with what is due, and delete what nobody maps any more."""
        while True:
            opened = self._open(self._due, self._files.retire, _target)
            opened += self._open(self._shut, self._files.open_again, str)
            reaped = self._reap()
            excess = self._files.open_zombies()[self._most_open :]
            if excess or not (self._due or self._shut) or not opened + reaped:
                break
        for name in excess:
            self._files.shut(name)
        self._shut.extend(excess)

    def is_due(self, source: str) -> bool:
        """Whether a file of this name still waits for its end: the name cannot be used again yet."""
        return any(effect.source == source for effect in self._due)

    def _open(self, due: deque[T], begin: Callable[[T], None], name_of: Callable[[T], str]) -> int:
        """How many of them have begun their end; what is refused stands behind the others then."""
        count = 0
        for _ in range(min(len(due), self._at_once)):
            one = due.popleft()
            try:
                begin(one)
            except FileNotFoundError as error:
                self._log.error("a file was deleted by somebody else", error=str(error))
                self._index.reaped(name_of(one))
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    due.appendleft(one)
                    break
                due.append(one)
                self._say(name_of(one), error)
            else:
                self._refused.discard(name_of(one))
                count += 1
        return count

    def _reap(self) -> int:
        count = 0
        for name in self._files.unmapped():
            if self._index.keep(name, self._now()):
                self._files.keep(name)
                continue
            try:
                self._files.delete(name)
            except OSError as error:
                self._say(name, error)
                continue
            self._refused.discard(name)
            self._index.reaped(name)
            count += 1
        return count

    def _say(self, name: str, error: OSError) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._log.error("a file cannot be deleted; its bytes count until it is", file=name, error=str(error))


def _target(effect: Retire) -> str:
    return effect.target
