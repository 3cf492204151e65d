"""A virtual clock: an event loop that jumps to its next timer, and nodes, which are the processes that run on it.

All actors of a world share one loop and one thread. Each callback belongs to the node in whose context it was
scheduled; the callbacks of a killed node never run. Functions submitted to an executor run on the loop instead, after a
virtual delay; those of one executor run in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from random import Random
from typing import Any

CURRENT: contextvars.ContextVar[Node | None] = contextvars.ContextVar("node", default=None)
START_S = 1_000.0
COMPUTE_S = 0.02
THREAD_S = 0.001


class Killed(BaseException):
    """Exception that unwinds the code of a process that was killed while the code was running."""


class Stuck(Exception):
    """Exception for a run that has no event left before its end, or that has too many events."""


class Node:
    """One life of one process. Functions in `on_kill` do what a kernel does for a dead process, such as closing its
    files."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.stopped: list[Callback] | None = None
        """Callbacks that wait until a stopped process (SIGSTOP) continues, or None while it runs."""
        self.service: Any = None
        self.on_kill: list[Callable[[], object]] = []
        self.strike_at: int | None = None
        """Number of the input or output operation at which the process is killed."""
        self.operations = 0
        self.context = contextvars.Context()
        self.context.run(CURRENT.set, self)
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > 512:
            self._tasks = [each for each in self._tasks if (found := each()) is not None and not found.done()]

    def kill(self) -> None:
        """End the process at once.

        Its coroutines are closed, just as a dead process loses its frames, and they send nothing.
        """
        if not self.alive:
            return
        self.alive = False
        for reference in self._tasks:
            task = reference()
            if task is not None and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                self.context.copy().run(_close, task.get_coro())
        self._tasks.clear()
        for done in self.on_kill:
            done()
        self.on_kill.clear()
        self.service = None


def _close(coroutine: Any) -> None:
    # The coroutine might await or send something while it is being closed, or might be running.
    with contextlib.suppress(Exception, Killed):
        coroutine.close()


class Callback:
    """A node's callback, as returned by `call_soon` and `call_at`."""

    __slots__ = ("args", "call", "context", "node", "when")

    def __init__(self, call: Any, args: tuple[Any, ...], context: contextvars.Context | None, when: float) -> None:
        self.call = call
        self.args = args
        self.node = CURRENT.get() if context is None else context.get(CURRENT)
        self.context = contextvars.copy_context() if context is None else context
        self.when = when

    def cancel(self) -> None:
        # The referenced objects are released before the timer is due.
        self.call, self.args, self.node = None, (), None


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._time = START_S
        self._rng = rng
        self._numbers = itertools.count()
        """Numbers that order timers that are due at the same time."""
        self._free_at: weakref.WeakKeyDictionary[Executor, float] = weakref.WeakKeyDictionary()
        self.before_waiting: list[Callable[[], object]] = []
        """Functions that are each called once, as soon as no callback is ready."""
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self._time

    # ---- one round of the loop

    def _run_once(self) -> None:
        """Run the ready callbacks, and those that become ready in the meantime. If none is left, jump to the next
        timer.

        The callbacks of a dead process do not run. The callbacks of a stopped process run when it continues.
        """
        ready: deque[Callback] = self._ready  # type: ignore[attr-defined]
        while ready:
            each = ready.popleft()
            if each.call is None:
                continue
            node = each.node
            if node is not None:
                if not node.alive:
                    continue
                if node.stopped is not None:
                    node.stopped.append(each)
                    continue
            try:
                each.context.run(each.call, *each.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException:  # noqa: S110  # it ends only the callback, as in every event loop
                pass
            if self._stopping:  # type: ignore[attr-defined]
                return
        while self.before_waiting:  # Every process is waiting for input, a timer or a thread.
            self.before_waiting.pop()()
        if ready:
            return
        timers: list[tuple[float, int, Callback]] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing is left to happen")
        self._time = max(self._time, timers[0][0])
        while timers and timers[0][0] <= self._time:
            ready.append(heapq.heappop(timers)[2])

    def _process_events(self, event_list: list[object]) -> None: ...

    def _write_to_self(self) -> None: ...

    def let_go_on(self, node: Node) -> None:
        """Continue a stopped process (SIGCONT)."""
        waiting, node.stopped = node.stopped or [], None
        self._ready.extend(waiting)  # type: ignore[attr-defined]

    # ---- callbacks know their node

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        made = Callback(callback, args, context, self._time)
        self._ready.append(made)  # type: ignore[attr-defined]
        return made

    # asyncio calls it to close an async generator that nothing refers to any more, such as one of a killed process
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        made = Callback(callback, args, context, when)
        heapq.heappush(self._scheduled, (when, next(self._numbers), made))  # type: ignore[attr-defined]
        return made

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        node = (contextvars.copy_context() if context is None else context).get(CURRENT)
        if node is not None:
            node.adopt(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run `func` on the loop, after a delay and after all earlier functions of the same executor."""
        future = self.create_future()
        computes = getattr(executor, "_thread_name_prefix", "").startswith("compute")
        delay = self._rng.expovariate(1.0) * (COMPUTE_S if computes else THREAD_S)
        at = self._time + delay
        if executor is not None:
            at = max(at, self._free_at.get(executor, 0.0))
            self._free_at[executor] = at
        self.call_at(at, _execute, future, func, args)
        return future


def _execute(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return  # An executor also skips cancelled work that has not begun.
    try:
        result = func(*args)
    except StopIteration as error:
        raise RuntimeError("StopIteration from an executor") from error
    except Exception as error:  # The exception is passed on to the caller.
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)
