"""Files on their way out: hidden under a zombie's name in order, deleted when nobody maps them. It must never lose one:
the index has let go of it already, so what finds no descriptor now stays due.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from services.batch_store.files import StoreFiles
from services.batch_store.room import Retire
from services.batch_store.state import StoreState

AT_ONCE = 256
"""Each zombie keeps a descriptor until it is deleted: after so many those that nobody maps are."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Retirement:
    """Carries out what the index of one store decided; belongs to the store's event loop."""

    def __init__(self, index: StoreState, files: StoreFiles, now: Callable[[], float]) -> None:
        """`now`: the loop's time in seconds."""
        self._index = index
        self._now = now
        self._files = files
        self._due: deque[Retire] = deque()

    def take(self, effects: Iterable[Retire]) -> None:
        """Retire these after what is still due, as far as descriptors go."""
        self._due.extend(effects)
        if self._due:
            self.settle()

    def settle(self) -> None:
        """Go on with what is due, and delete what nobody maps any more."""
        while True:
            hidden, reaped = self._hide(), self._reap()
            if not self._due or not hidden + reaped:
                return

    def is_due(self, source: str) -> bool:
        """Whether a file of this name still waits for its end: the name cannot be used again yet."""
        return any(effect.source == source for effect in self._due)

    def _hide(self) -> int:
        count = 0
        while self._due and count < AT_ONCE:
            try:
                self._files.retire(self._due[0])
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                break
            self._due.popleft()
            count += 1
        return count

    def _reap(self) -> int:
        gone = self._files.reap(partial(self._index.keep, now=self._now()))
        for name in gone:
            self._index.reaped(name)
        return len(gone)
