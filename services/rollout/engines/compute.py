"""The thread on which an engine in this process computes, and the calls to the engine that it runs side by side.

The thread runs one piece of work at a time, and a paused block takes no steps. One step serves all calls, and a new
call joins those in progress. The end, failure or cancellation of one call does not affect the samples of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from services.rollout.engine import Generation, GenerationCancelled, GenerationWatch, Prompt, SamplingParams

_PAUSE_POLL_S = 0.1
T = TypeVar("T")


class ComputeThread:
    """Runs work for the service's loop in call order, but `between_steps` also runs work inside a block."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._running = threading.Event()
        self._running.set()
        self._stopped = threading.Event()
        self._between: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Work for a block to do before its next step. Without a block, the thread does this work itself."""
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
        """Run `work` as `run` does, but also in the middle of a block, paused or not."""
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
        """Do the work that waits, and wait while paused. Return False if `going_on` reports that there is nothing left
        to do.

        Call this before each step. `going_on` is also called from time to time during a pause. Raises
        GenerationCancelled if the thread must stop.
        """
        while not self._running.is_set():
            with contextlib.suppress(queue.Empty):
                self._between.get(timeout=_PAUSE_POLL_S)()
            if not going_on():
                return False
        if not self._between.empty():
            if not going_on():  # what was abandoned is dropped before the work
                return False
            self._do_waiting()
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


class EngineCall:
    """One call of `Engine.generate`. Once it is submitted, the loop uses only its `answer` and `cancel`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None,
    ) -> None:
        self.prompts = prompts
        self.sampling = sampling
        self.cancel = cancel
        self.answer: Future[list[list[Generation]]] = Future()
        self._watch = watch
        self.note_due = time.monotonic() + watch.every_s if watch is not None else math.inf

    def note(self, groups: list[list[Generation]]) -> None:
        """Pass the call's results so far to its watch, if it has one."""
        if self._watch is not None:
            self._watch.note(groups)
            self.note_due = time.monotonic() + self._watch.every_s


class Stepper(Protocol):
    """The part of an engine that works on calls, always on the compute thread."""

    def add(self, call: EngineCall) -> bool:
        """Accept the call, or return False to be asked again once the calls in progress have ended."""

    def step(self) -> None:
        """Take one step for all calls, and set the `answer` of every call that this step finishes."""

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        """Return a call's results so far."""

    def drop(self, call: EngineCall) -> None:
        """Forget a call."""


class SideBySide:
    """Runs calls together. `generate` runs on the service's loop, and everything else on the compute thread."""

    def __init__(self, compute: ComputeThread, stepper: Stepper) -> None:
        self._compute = compute
        self._stepper = stepper
        self._coming: queue.SimpleQueue[EngineCall] = queue.SimpleQueue()
        self._waiting: deque[EngineCall] = deque()
        self._under_way: list[EngineCall] = []
        self.seconds = 0.0
        """Total seconds during which at least one call was in progress."""

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None,
    ) -> list[list[Generation]]:
        """Generate as `Engine.generate` describes."""
        call = EngineCall(prompts, sampling, cancel, watch)
        self._coming.put(call)
        self._compute.begin(self._work)  # has nothing to do if the work for an earlier call includes this one
        return await asyncio.wrap_future(call.answer)

    def _work(self) -> None:
        """Work until no calls are left."""
        began = time.perf_counter()
        try:
            while self._compute.before_step(self._going_on):
                self._take_up()
                for call in self._under_way:
                    if time.monotonic() >= call.note_due:
                        call.note(self._stepper.so_far(call))
                if self._under_way:
                    self._stepper.step()
                self._under_way = [call for call in self._under_way if not call.answer.done()]
        except BaseException as error:
            for call in self._under_way:
                if not call.answer.done():  # some may have ended in the step that failed
                    self._end(call, error)
            for call in self._waiting:
                call.answer.set_exception(error)
            self._under_way.clear()
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self.seconds += time.perf_counter() - began

    def _going_on(self) -> bool:
        """End the calls that were abandoned. Return whether any calls are left."""
        while not self._coming.empty():
            call = self._coming.get()
            if call.answer.set_running_or_notify_cancel():  # its caller is still waiting
                self._waiting.append(call)
        for call in [call for call in self._under_way if call.cancel.is_set()]:
            self._under_way.remove(call)
            self._end(call, given_up())
        for call in [call for call in self._waiting if call.cancel.is_set()]:
            self._waiting.remove(call)
            call.answer.set_exception(given_up())
        return bool(self._under_way or self._waiting)

    def _take_up(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            try:
                if not self._stepper.add(call):
                    return
            except Exception as error:
                call.answer.set_exception(error)
            else:
                self._under_way.append(call)
            self._waiting.popleft()

    def _end(self, call: EngineCall, error: BaseException) -> None:
        """End a call in progress with an error."""
        try:
            if isinstance(error, GenerationCancelled):
                call.note(self._stepper.so_far(call))
            self._stepper.drop(call)
        except Exception as defect:
            error = defect
        call.answer.set_exception(error)
