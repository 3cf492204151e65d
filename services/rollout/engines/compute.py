"""The one thread that an engine in this process computes on. Must never run two pieces of work at once, nor let a
paused block take a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.rollout.engines.decode import check_cancelled

_PAUSE_POLL_S = 0.1
T = TypeVar("T")


class ComputeThread:
    """Work comes from the service's loop and is done in the order it was asked for, except that `between_steps` gets
    into the midst of a paused block.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._running = threading.Event()
        self._running.set()
        self._stopped = threading.Event()
        self._between: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What a paused block does while it waits; the thread itself when there is no such block."""

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def begin(self, work: Callable[[], None]) -> None:
        """As `run`, for work that says itself when it is done."""
        self._executor.submit(work)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """As `run`, and in the midst of a block if that is paused."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)

        self._between.put(run)
        self._executor.submit(self._do_waiting)
        return await asyncio.wrap_future(done)

    def pause(self) -> None:
        """Hold a block before its next step."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()
        self._between.put(lambda: None)  # wakes a block that waits for something to do

    async def stop(self, closing: Callable[[], None], timeout_s: float) -> None:
        """End the block that runs, then do `closing`. What does not return in `timeout_s` is left to the process's
        own end."""
        self._stopped.set()
        self._running.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.run(closing), timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- on the thread

    def before_step(self, going_on: Callable[[], bool]) -> bool:
        """Whoever samples calls this before each step; waits while paused. False: there is nothing left to step for,
        says `going_on`, which is asked now and again in a pause. Raises GenerationCancelled when the thread is to end.
        """
        while not self._running.is_set():
            with contextlib.suppress(queue.Empty):
                self._between.get(timeout=_PAUSE_POLL_S)()
            if not going_on():
                return False
        self.check_stopped()
        return going_on()

    def before_block_step(self, cancel: threading.Event) -> None:
        """The same for a block that is alone on the thread. Raises GenerationCancelled when `cancel` is set, too."""

        def going_on() -> bool:
            check_cancelled(cancel)
            return True

        self.before_step(going_on)

    def check_stopped(self) -> None:
        """Raises GenerationCancelled."""
        check_cancelled(self._stopped)

    def _do_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._between.get_nowait()()


class Counted:
    """What engines on a compute thread have alike of `services.rollout.engine.Engine`: progress, and other work."""

    _compute: ComputeThread
    _progress: int

    @property
    def progress(self) -> int:
        return self._progress

    async def compute(self, work: Callable[[], T]) -> T:
        def counted() -> T:
            result = work()
            self._progress += 1
            return result

        return await self._compute.run(counted)
