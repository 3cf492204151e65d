"""The newest clears of one life of a store, numbered, for readers elsewhere that keep copies. It must stay bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice

from proto.messages import Cleared, PutTask

KEPT = 65536
PAGE = 16384


class ClearLog:
    """Belongs to one event loop."""

    def __init__(self, log: int) -> None:
        """`log` tells this life's numbers from those of another."""
        self._log = log
        self._serial = 0
        self._kept: deque[PutTask] = deque(maxlen=KEPT)
        self._grown = asyncio.Event()

    def add(self, tasks: Iterable[PutTask]) -> None:
        """Note (task, fence) pairs that were cleared."""
        for task in tasks:
            self._kept.append(task)
            self._serial += 1
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def since(self, log: int, serial: int) -> Cleared:
        """What came after `serial` of `log`."""
        behind = self._serial - serial
        if log != self._log or not 0 <= behind <= len(self._kept):
            return Cleared(log=self._log, serial=self._serial, whole=False)
        begin = len(self._kept) - behind
        page = list(islice(self._kept, begin, begin + PAGE))
        return Cleared(log=self._log, serial=serial + len(page), whole=True, tasks=page, more=len(page) < behind)

    async def later(self, log: int, serial: int, until: float) -> Cleared:
        """As `since`, but waits for something to say until loop time `until`."""
        loop = asyncio.get_running_loop()
        while log == self._log and serial == self._serial and loop.time() < until:
            grown = self._grown
            try:
                async with asyncio.timeout_at(until):
                    await grown.wait()
            except TimeoutError:
                break
        return self.since(log, serial)
