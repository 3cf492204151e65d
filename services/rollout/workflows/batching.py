"""Collects the calls of many samples into blocks for the engine. Must never let a call wait for one that has not come
yet longer than GATHER_S: samples take turns at their own pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.rollout.engine import Engine, Generation, GenerationCancelled, Prompt, SamplingParams

GATHER_S = 0.02
QUIET_S = 0.002
MAX_BLOCK = 256


class _Either(threading.Event):
    """Is set once `other` is, too."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


@dataclass(eq=False)
class _Waiting:
    prompt: Prompt
    sampling: SamplingParams
    answer: asyncio.Future[Generation]


class CallBatcher:
    """Belongs to the service's loop. One a lease: its `cancel` ends what the engine is at, and so does `give_up`."""

    def __init__(self, engine: Engine, cancel: threading.Event, told: Callable[[float], None]) -> None:
        """`told(seconds)`: a block has been sampled."""
        self._engine = engine
        self._gives_up = False
        self._cancel = _Either(cancel)
        self._told = told
        self._waiting: deque[_Waiting] = deque()
        self._came = asyncio.Event()
        self._sampling = False

    @property
    def asks(self) -> bool:
        """Whether anything waits for the engine."""
        return self._sampling or bool(self._waiting)

    def give_up(self) -> None:
        """`run` ends as soon as the engine has let go of what it is at, which is for nobody any more."""
        self._gives_up = True
        self._cancel.set()
        self._came.set()

    async def sample(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """One generation. Calls with equal `sampling` share a block; `prompt.name` must be unique among calls."""
        mine = _Waiting(prompt, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._came.set()
        return await mine.answer

    async def run(self) -> None:
        """Work until cancelled or given up. Raises what the engine raises: GenerationCancelled at the lease's end."""
        try:
            while not self._gives_up:
                await self._gather()
                block = self._block()
                if not block:
                    continue
                loop = asyncio.get_running_loop()
                started = loop.time()
                self._sampling = True
                groups = await self._engine.generate([each.prompt for each in block], block[0].sampling, self._cancel)
                self._sampling = False
                self._told(loop.time() - started)
                for each, (generation,) in zip(block, groups, strict=True):
                    if not each.answer.done():  # its sample may have run out of time
                        each.answer.set_result(generation)
        except GenerationCancelled:
            if not self._gives_up:
                raise
        finally:
            for each in self._waiting:
                each.answer.cancel()

    async def _gather(self) -> None:
        """Until something waits and nothing more comes for a moment."""
        if not self._waiting:
            self._came.clear()
            await self._came.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                while True:
                    self._came.clear()
                    async with asyncio.timeout(QUIET_S):
                        await self._came.wait()

    def _block(self) -> list[_Waiting]:
        """The calls that go with the oldest one."""
        live = [each for each in self._waiting if not each.answer.done()]
        block = [each for each in live if each.sampling == live[0].sampling][:MAX_BLOCK]
        taken = set(map(id, block))
        self._waiting = deque(each for each in live if id(each) not in taken)
        return block
