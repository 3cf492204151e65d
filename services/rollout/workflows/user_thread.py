"""The thread on which users' coroutines run, and what they see of the service. A workflow that blocks this thread,
hangs or raises must never cost more than its own sample.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.rollout.workflows.calls import SampleCalls
from shared.workflow import Message, Trajectory, Turn

STOP_S = 1.0
T = TypeVar("T")


class UserThread:
    """An event loop on a daemon thread. One that is stuck is left behind: Python cannot end a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._seen = time.monotonic()
        self._asked = False
        self._tasks: dict[concurrent.futures.Future[Any], asyncio.Task[None]] = {}
        threading.Thread(target=self._serve, name="workflows", daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> concurrent.futures.Future[T]:
        """Run `work` as a task of this name."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def told() -> None:
            answer.set_running_or_notify_cancel()
            try:
                answer.set_result(await work)
            except BaseException as error:  # SystemExit too: it must not end the loop of the others
                answer.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            finally:
                self._tasks.pop(answer, None)

        def begin() -> None:
            self._tasks[answer] = self._loop.create_task(told(), name=name)

        self._loop.call_soon_threadsafe(begin)
        return answer

    def give_up(self, answer: concurrent.futures.Future[Any]) -> None:
        """Cancel the work of `answer`, if it has not ended."""

        def cancel() -> None:
            if answer in self._tasks:
                self._tasks[answer].cancel()

        self._loop.call_soon_threadsafe(cancel)

    def stalled_s(self) -> float:
        """Seconds for which the loop has not come round; ask a few times a second."""
        if not self._asked:
            self._asked = True
            self._seen = time.monotonic()
            self._loop.call_soon_threadsafe(self._came_round)
        return time.monotonic() - self._seen

    def running(self) -> str:
        """The name of the task that the loop is in; empty if in none."""
        task = asyncio.current_task(self._loop)
        return task.get_name() if task is not None else ""

    def stop(self) -> None:
        """Cancel everything and end the loop, once it comes round."""

        async def end() -> None:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_S)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)

    def _came_round(self) -> None:
        self._asked = False


class UserLLM:
    """See `shared.workflow.LLM`. Lives on the user's thread; every call goes over to the service's loop."""

    def __init__(self, calls: SampleCalls, service: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._service = service

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Turn:
        return await self._over(self._calls.chat(copy.deepcopy(messages), copy.deepcopy(tools)))

    async def complete(self, prompt: str) -> Turn:
        return await self._over(self._calls.complete(prompt))

    def trajectory(
        self, reward: float | dict[str, float] | None = None, metrics: dict[str, float] | None = None
    ) -> Trajectory:
        return Trajectory(copy.deepcopy(self._calls.conversation.sequences()), reward, dict(metrics or {}))

    async def _over(self, call: Coroutine[Any, Any, Turn]) -> Turn:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._service))


class UserContext:
    """See `shared.workflow.Context`."""

    def __init__(self, task_id: str, sample: int, timeout_s: float, base_url: Callable[[], str]) -> None:
        self.task_id = task_id
        self.sample = sample
        self.state: dict[str, Any] = {}
        self._deadline = time.monotonic() + timeout_s
        self._base_url = base_url

    @property
    def base_url(self) -> str:
        return self._base_url()

    @property
    def remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    async def call(self, tool: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(take: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if answer.done() else take())

        def work() -> None:
            try:
                result = tool(*args)
            except Exception as error:
                failure = error
                tell(lambda: answer.set_exception(failure))
            except BaseException as error:
                failure = RuntimeError(f"{tool!r:.60} raised {error!r:.100}")
                tell(lambda: answer.set_exception(failure))
            else:
                tell(lambda: answer.set_result(result))

        # A thread each, not a pool: one that never answers must not keep a place.
        threading.Thread(target=work, name="tool", daemon=True).start()
        limit_s = self.remaining_s if timeout_s is None else min(timeout_s, self.remaining_s)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"tool {tool!r:.60} gave no answer within {limit_s:.3g} s") from None
