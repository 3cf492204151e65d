"""Handles SIGINT, SIGTERM and SIGHUP in the launcher, from its first line to its last.

A signal that the launcher inherited as ignored stays ignored: `nohup` ignores SIGHUP, and a shell without job control
ignores SIGINT in commands started with `&`. SIGTERM always ends the run.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupts:
    """Handles the signals for the whole life of the process. Use it only on the main thread.

    A signal raises KeyboardInterrupt, unless `tell` has set a function to call instead. asyncio's own handlers would
    not suffice, because a loop that closes restores the default action of the signals, and that action ends the
    process.
    """

    def __init__(self) -> None:
        inherited = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
        kept = [number for number, handler in inherited.items() if handler != signal.SIG_IGN]
        self._numbers = [*kept, signal.SIGTERM]
        self._told: Callable[[], object] = self._raise
        self._holds = self._waits = False
        for number in self._numbers:
            signal.signal(number, self._take)

    def tell(self, told: Callable[[], object]) -> None:
        """Call `told` on each signal from now on, on the main thread."""
        self._told = told

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay any signal until the end of the block. A signal mask would not be enough, because other threads would
        still receive the signals."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        if self._waits:
            self._told()

    @contextlib.contextmanager
    def telling(self, told: Callable[[], object]) -> Iterator[None]:
        """Call `told` on each signal within the block."""
        before, self._told = self._told, told
        try:
            yield
        finally:
            self._told = before

    def ignore(self) -> None:
        """Ignore the signals until the process ends: the run is over, and its outcome is about to be reported."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._waits = True
        else:
            self._told()

    def _raise(self) -> None:
        self.ignore()  # No signal interrupts the cleanup after the exception.
        raise KeyboardInterrupt
