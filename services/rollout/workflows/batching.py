"""Collects the calls of many samples into blocks for the engine.

Samples proceed at their own pace: a call waits at most GATHER_S for further calls, and does not wait for earlier blocks
if the engine works on several at a time.
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


class _EitherEvent(threading.Event):
    """An event that also counts as set while `other` is set."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


@dataclass(eq=False)
class _WaitingCall:
    prompt: Prompt
    sampling: SamplingParams
    answer: asyncio.Future[Generation]


class CallBatcher:
    """The calls of one lease, on the service's loop. The lease's `cancel` and `give_up` both stop the engine's work."""

    def __init__(self, engine: Engine, cancel: threading.Event, on_idle: Callable[[float], None]) -> None:
        """When the engine runs out of blocks, `on_idle` is called with the number of seconds for which the engine was
        busy."""
        self._engine = engine
        self._given_up = False
        self._cancel = _EitherEvent(cancel)
        self._on_idle = on_idle
        self._waiting: deque[_WaitingCall] = deque()
        self._arrived = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._began = 0.0

    @property
    def asks(self) -> bool:
        """Whether any call is waiting for the engine."""
        return bool(self._under_way or self._waiting)

    def give_up(self) -> None:
        """Abandon all calls. `run` ends as soon as the engine has stopped working on them."""
        self._given_up = True
        self._cancel.set()
        self._arrived.set()

    async def sample(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """Return one generation. Calls with equal `sampling` share a block. `prompt.name` must be unique."""
        mine = _WaitingCall(prompt, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._arrived.set()
        return await mine.answer

    async def run(self) -> None:
        """Run until cancelled, or until `give_up` is called. Raises the engine's errors, such as GenerationCancelled
        when the lease ends."""
        gathering = asyncio.create_task(self._gather())
        try:
            while not self._given_up:
                may_begin = self._engine.side_by_side or not self._under_way
                waiting = {*self._under_way, *(() if gathering.done() else (gathering,))}
                if not may_begin or not gathering.done():
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    self._reap()
                    continue
                block = self._take_block()
                if block:
                    self._begin(block)
                gathering = asyncio.create_task(self._gather())
            await asyncio.gather(*self._under_way)
        except GenerationCancelled:
            if not self._given_up:
                raise
        finally:
            for task in (gathering, *self._under_way):
                task.cancel()
            await asyncio.gather(gathering, *self._under_way, return_exceptions=True)
            for ask in self._waiting:
                ask.answer.cancel()

    def _begin(self, block: list[_WaitingCall]) -> None:
        if not self._under_way:
            self._began = asyncio.get_running_loop().time()
        self._under_way.add(asyncio.create_task(self._sample_block(block)))

    async def _sample_block(self, block: list[_WaitingCall]) -> None:
        groups = await self._engine.generate([ask.prompt for ask in block], block[0].sampling, self._cancel)
        for ask, (generation,) in zip(block, groups, strict=True):
            if not ask.answer.done():  # its sample may have run out of time
                ask.answer.set_result(generation)

    def _reap(self) -> None:
        for task in [task for task in self._under_way if task.done()]:
            self._under_way.discard(task)
            task.result()
            if not self._under_way:
                self._on_idle(asyncio.get_running_loop().time() - self._began)

    async def _gather(self) -> None:
        """Wait for a call, and then until no further call has arrived for QUIET_S, but at most for GATHER_S."""
        if not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                while True:
                    self._arrived.clear()
                    async with asyncio.timeout(QUIET_S):
                        await self._arrived.wait()

    def _take_block(self) -> list[_WaitingCall]:
        """Remove and return the calls with the same `sampling` as the oldest call, at most MAX_BLOCK of them."""
        live = [ask for ask in self._waiting if not ask.answer.done()]
        block = [ask for ask in live if ask.sampling == live[0].sampling][:MAX_BLOCK]
        taken = set(map(id, block))
        self._waiting = deque(ask for ask in live if id(ask) not in taken)
        return block
