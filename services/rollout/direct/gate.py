"""Lets samples run beside one another, and what must run alone wait for their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ScoreGate:
    """Without `needed`, everything runs beside everything. It is used only on the service's loop."""

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._beside = 0
        self._alone = 0
        """Number of tasks that are alone or wait to be. While there are some, no sample begins."""
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Enter once nothing runs alone or waits for that."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone)
            self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1
            await self._wake()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Enter once no sample runs, if that is needed."""
        if not self._needed:
            yield
            return
        self._alone += 1
        try:
            async with self._turn:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._beside)
                yield
        finally:
            self._alone -= 1
            await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
