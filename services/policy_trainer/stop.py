"""Passes on the order to stop the run after the open step. The order cannot be withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stop:
    """An order to stop that tasks of one event loop can wait for."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Give the order."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or cancel it and return None if the order comes first."""
        if self.asked:
            work.close()
            return None
        task, order = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for waiting in (task, order):
                waiting.cancel()
            await asyncio.gather(task, order, return_exceptions=True)
