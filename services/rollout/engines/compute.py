"""The thread on which an engine in this process computes.

It runs one piece of work at a time, and a paused block takes no steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.rollout.engine import GenerationCancelled

_PAUSE_POLL_S = 0.1
T = TypeVar("T")


class ComputeThread:
    """Runs work for the service's loop in call order, but `between_steps` also runs work inside a paused block."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._running = threading.Event()
        self._running.set()
        self._stopped = threading.Event()
        self._between: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Work for a paused block to do while it waits. Without such a block, the thread does this work itself."""
        self.progress = 0
        """See `Engine.progress`. Only work on the thread advances it."""

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def counted(self, work: Callable[[], T]) -> T:
        """Run `work` as `run` does, and count it as progress."""

        def run() -> T:
            result = work()
            self.progress += 1
            return result

        return await self.run(run)

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work` as `run` does, but do not wait: the work itself reports when it ends."""
        self._executor.submit(work)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` as `run` does, but also in the middle of a paused block."""
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
        """Pause the running block before its next step."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()
        self._between.put(lambda: None)  # wakes a block that is waiting for something to do

    async def stop(self, closing: Callable[[], None], timeout_s: float) -> None:
        """Stop the running block, then run `closing`. Work that outlasts `timeout_s` is left running."""
        self._stopped.set()
        self._running.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.run(closing), timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- on the thread

    def before_step(self, going_on: Callable[[], bool]) -> bool:
        """Wait while paused. Return False if `going_on` reports that there is nothing left to do.

        Call this before each step. `going_on` is also called from time to time during a pause. Raises
        GenerationCancelled if the thread must stop.
        """
        while not self._running.is_set():
            with contextlib.suppress(queue.Empty):
                self._between.get(timeout=_PAUSE_POLL_S)()
            if not going_on():
                return False
        self.check_stopped()
        return going_on()

    def check_stopped(self) -> None:
        """Raise GenerationCancelled if the thread must stop."""
        if self._stopped.is_set():
            raise given_up()

    def _do_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._between.get_nowait()()


def given_up() -> GenerationCancelled:
    """Return the error for a call whose `cancel` event is set."""
    return GenerationCancelled("the block was abandoned because its lease ended")
