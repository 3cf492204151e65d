"""Files on their way out: hidden under a zombie's name in order, deleted when nobody maps them. It must never lose one:
the index has let go of it already, so what finds no descriptor now stays due.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from services.batch_store.files import StoreFiles
from services.batch_store.room import Retire
from services.batch_store.state import StoreState

AT_ONCE = 256
"""Each zombie keeps a descriptor until it is deleted: after so many those that nobody maps are."""
T = TypeVar("T")
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Retirement:
    """Carries out what the index of one store decided; belongs to the store's event loop."""

    def __init__(self, index: StoreState, files: StoreFiles, now: Callable[[], float]) -> None:
        """`now`: the loop's time in seconds."""
        self._index = index
        self._now = now
        self._files = files
        self._due: deque[Retire] = deque()
        self._spares: deque[str] = deque()

    def take(self, effects: Iterable[Retire]) -> None:
        """Retire these after what is still due, as far as descriptors go."""
        self._due.extend(effects)
        if self._due:
            self.settle()

    def free(self, names: Iterable[str]) -> None:
        """Delete these, which the index has given up as spares, as far as descriptors go."""
        self._spares.extend(names)
        if self._spares:
            self.settle()

    def settle(self) -> None:
        """Go on with what is due, and delete what nobody maps any more."""
        while True:
            opened = self._open(self._due, self._files.retire) + self._open(self._spares, self._files.give_up_spare)
            reaped = self._reap()
            if not (self._due or self._spares) or not opened + reaped:
                return

    def is_due(self, source: str) -> bool:
        """Whether a file of this name still waits for its end: the name cannot be used again yet."""
        return any(effect.source == source for effect in self._due)

    def _open(self, due: deque[T], begin: Callable[[T], None]) -> int:
        """How many of them have begun their end."""
        count = 0
        while due and count < AT_ONCE:
            try:
                begin(due[0])
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                break
            due.popleft()
            count += 1
        return count

    def _reap(self) -> int:
        gone = self._files.reap(partial(self._index.keep, now=self._now()))
        for name in gone:
            self._index.reaped(name)
        return len(gone)
