"""A virtual clock: an event loop that jumps to its next timer, and nodes, the processes that live on it.

All actors of a world share one loop and one thread. Each callback belongs to the node in whose context it was
scheduled; the callbacks of a killed node never run. Functions for executors run on the loop after a virtual delay, in
order per executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from random import Random
from typing import Any

CURRENT: contextvars.ContextVar[Node | None] = contextvars.ContextVar("node", default=None)
START_S = 1_000.0
COMPUTE_S = 0.02
THREAD_S = 0.001


class Killed(BaseException):
    """Unwinds the code of a process that was killed in the middle of it."""


class Stuck(Exception):
    """Nothing is left to happen, or too much has happened, and the run has not ended."""


class Node:
    """One life of one process. `on_kill` does what a kernel does for a dead process, such as closing its files."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.stopped: list[_Handle | _Timer] | None = None
        """The callbacks that wait until a stopped process (SIGSTOP) continues. None while it runs."""
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
        """End the process at once. Its coroutines are closed, as frames would be unmapped; nothing of them is sent."""
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
    with contextlib.suppress(Exception, Killed):  # it awaits or sends something on its way out, or is running
        coroutine.close()


class _Handle(events.Handle):
    __slots__ = ("node",)
    node: Node | None

    def _run(self) -> None:
        if self.node is None or _runs(self, self.node):
            super()._run()


class _Timer(events.TimerHandle):
    __slots__ = ("node",)
    node: Node | None

    def _run(self) -> None:
        if self.node is None or _runs(self, self.node):
            super()._run()


def _runs(handle: _Handle | _Timer, node: Node) -> bool:
    """Return whether the callback may run now. Those of a stopped process run when it continues."""
    if node.alive and node.stopped is not None:
        node.stopped.append(handle)
        return False
    return node.alive


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._time = START_S
        self._rng = rng
        self._free_at: weakref.WeakKeyDictionary[Executor, float] = weakref.WeakKeyDictionary()
        self.before_waiting: list[Callable[[], object]] = []
        """Called once each, when no callback is ready."""
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self._time

    # ---- one round of the loop

    def _run_once(self) -> None:
        """Run what is ready, and whatever that makes ready. If nothing is left, jump to the next timer."""
        ready: deque[_Handle | _Timer] = self._ready  # type: ignore[attr-defined]
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:  # type: ignore[union-attr]
                handle._run()
            if self._stopping:  # type: ignore[attr-defined]
                return
        while self.before_waiting:  # every process waits for input, a timer or a thread
            self.before_waiting.pop()()
        if ready:
            return
        timers: list[_Timer] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)._scheduled = False
        if not timers:
            raise Stuck("nothing is left to happen")
        self._time = max(self._time, timers[0]._when)  # type: ignore[attr-defined]
        while timers and timers[0]._when <= self._time:  # type: ignore[attr-defined]
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer where it is, until its time comes."""

    def _process_events(self, event_list: list[object]) -> None: ...

    def _write_to_self(self) -> None: ...

    def let_go_on(self, node: Node) -> None:
        """Continue a stopped process (SIGCONT)."""
        waiting, node.stopped = node.stopped or [], None
        self._ready.extend(waiting)  # type: ignore[attr-defined]

    # ---- callbacks know their node

    def call_soon(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
        context = contextvars.copy_context() if context is None else context
        handle = _Handle(callback, args, self, context)
        handle.node = context.get(CURRENT)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        context = contextvars.copy_context() if context is None else context
        timer = _Timer(when, callback, args, self, context)
        timer.node = context.get(CURRENT)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True
        return timer

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[no-untyped-def]
        return self.call_at(self._time + delay, callback, *args, context=context)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        node = (contextvars.copy_context() if context is None else context).get(CURRENT)
        if node is not None:
            node.adopt(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run `func` on the loop, after a delay and after what the same executor was given before."""
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
        return  # as an executor does with work that has not begun
    try:
        result = func(*args)
    except StopIteration as error:
        raise RuntimeError("StopIteration from an executor") from error
    except Exception as error:  # handed to the caller
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)
