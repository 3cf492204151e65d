"""A process that runs users' code: `python -m services.rollout.user_code.process PURPOSE SOCKET MARKS STACK`.

It loads functions and calls them: coroutine functions as tasks of one loop, and other functions one after another. The
service kills the process when it hangs, and does not rely on it to exit. The process does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from proto.messages import LossReason
from services.rollout.rewards.judge import unavailable
from services.rollout.rewards.score import Score, total, totals
from services.rollout.user_code import frames
from services.rollout.user_code.confined import Offline, confine, limit_memory, read
from services.rollout.user_code.frames import (
    BeginSample,
    Failed,
    Marks,
    Purpose,
    Rated,
    RateSamples,
    Returned,
    Setup,
    frame,
)
from services.rollout.user_code.load import UserFunction, load
from services.rollout.user_code.trace import raised_at, traced
from services.rollout.user_code.user_side import (
    TOOL_STACK_BYTES,
    Link,
    ProcessContext,
    ProcessLLM,
    openai_client,
    uses_openai,
)
from shared.rpc.errors import RpcError, is_certain
from shared.stacks import write_stacks_on_signal
from shared.workflow import Sequence, Trajectory, WorkflowError

NO_MEMORY_STATUS = 70
_UNFIT_RESULT = {
    Purpose.REWARD: "returned a value that cannot be handed over",
    Purpose.WORKFLOW: "returned a value that cannot be handed over (ctx.state may hold only JSON values)",
}
_SLOT: contextvars.ContextVar[int] = contextvars.ContextVar("slot")


def main(descriptor: int, marks: int, stack: int) -> None:
    """Handle the messages of the service at the other end of the socket until the socket closes. `stack` is the
    descriptor of its `trace.StackFile`."""
    link = confine(descriptor)
    setup = read(link, Setup) if link is not None else None
    if link is None or setup is None:
        return
    os.set_inheritable(stack, False)
    write_stacks_on_signal(stack, all_threads=False)
    try:
        functions = [load(setup.purpose, path, params) for path, params in setup.functions]
    except RpcError as error:
        link.sendall(frame(frames.Ready(str(error), is_certain(error)), frames.TO_SERVICE_BYTES))
        return
    if setup.purpose is Purpose.WORKFLOW and uses_openai(functions[0].call):
        with contextlib.suppress(WorkflowError):  # the sample that uses it is told why there is none
            openai_client()
    threading.stack_size(TOOL_STACK_BYTES)
    limit_memory(setup.memory_bytes)
    ready = frames.Ready(
        group=[function.group for function in functions],
        is_async=[function.is_async for function in functions],
        homes=[function.home for function in functions],
        pid=os.getpid(),
    )
    link.sendall(frame(ready, frames.TO_SERVICE_BYTES))
    _CallSlots(link, Marks(marks), setup, functions).run()


def _no_memory_ends(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exit on a MemoryError, because a callback that ran out of memory may have lost a message."""
    if isinstance(context.get("exception"), MemoryError):
        os._exit(NO_MEMORY_STATUS)
    loop.default_exception_handler(context)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine that marks each of its steps with its slot."""

    def __init__(self, inner: Coroutine[Any, Any, Any], slot: int, marks: Marks) -> None:
        self._inner = inner
        self._slot = slot
        self._marks = marks

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        self._marks.enter(self._slot)
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:  # in a task, these would end the loop that all slots share
            raise RuntimeError(repr(error)) from None
        finally:
            self._marks.leave()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


class _CallSlots:
    """The calls in progress. One loop serves all calls, because clients and locks in user modules are bound to a
    loop."""

    def __init__(
        self,
        socket_: socket.socket,
        marks: Marks,
        setup: Setup,
        functions: list[UserFunction],
    ) -> None:
        self._marks = marks
        self._setup = setup
        self._functions = functions
        self._offline = Offline() if setup.offline else None
        # This is not the thread's current event loop, on which a plain function may run coroutines of its own.
        self._loop = loop = asyncio.new_event_loop()
        self._plain: deque[RateSamples] = deque()
        self._llms: dict[int, ProcessLLM] = {}
        self._tasks: dict[int, weakref.WeakSet[asyncio.Task[Any]]] = {}
        """The tasks of each workflow. Tasks of reward functions are left out, because one task may serve several
        calls."""
        loop.set_task_factory(self._make_task)
        loop.set_exception_handler(_no_memory_ends)
        self._link = Link(socket_, loop, self._take)

    def run(self) -> NoReturn:
        """Work until the process exits. Plain functions are called outside the loop, because they may run loops of
        their own."""
        while True:
            self._loop.run_forever()
            while self._plain:
                self._call_plain(self._plain.popleft())

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Create a task, as the loop's task factory. Tasks that a call starts are marked with the call's slot."""
        slot = (context.get(_SLOT) if context is not None else None) or _SLOT.get(0)
        if not slot:
            return asyncio.Task(coroutine, loop=loop, context=context)
        task = asyncio.Task(_Marked(coroutine, slot, self._marks), loop=loop, context=context)
        if self._setup.purpose is Purpose.WORKFLOW:
            self._tasks.setdefault(slot, weakref.WeakSet()).add(task)
        return task

    def _take(self, message: frames.ToProcess) -> None:
        """Handle a message from the service."""
        match message:
            case BeginSample():
                self._start(message.slot, self._functions[0], lambda: self._make(message))
            case RateSamples():
                function = self._functions[message.function]
                if function.is_async:
                    self._start(message.slot, function, lambda: self._rate(message))
                else:
                    self._plain.append(message)
                    self._loop.stop()
            case frames.Answered():
                if message.slot in self._llms:
                    self._llms[message.slot].deliver(message)
            case frames.GiveUp():
                self._end(message.slot)
            case frames.CheckLoop():
                self._link.send(frames.LoopRuns())
            case frames.Captured():
                pass  # `Link.captured` handles the answer itself

    def _start(self, slot: int, function: UserFunction, call: Callable[[], Awaitable[Returned | Rated]]) -> None:
        context = contextvars.copy_context()
        context.run(_SLOT.set, slot)
        self._loop.create_task(self._run(slot, function, call), context=context)

    def _end(self, slot: int) -> None:
        """Cancel all tasks of the slot. The service detects tasks that ignore the cancellation."""
        for task in list(self._tasks.pop(slot, ())):
            task.cancel()

    async def _run(self, slot: int, function: UserFunction, call: Callable[[], Awaitable[Returned | Rated]]) -> None:
        deadline = asyncio.timeout(self._setup.timeout_s)
        ended: Returned | Rated | Failed
        try:
            async with deadline:
                ended = await call()
        except asyncio.CancelledError:
            ended = Failed(slot, "was cancelled")
        except BaseException as error:  # anything that user code raises
            is_late = isinstance(error, TimeoutError) and deadline.expired()
            ended = self._late(slot, function, error) if is_late else self._raised(slot, function, error)
        self._send(ended)
        self._end(slot)

    async def _make(self, begin: BeginSample) -> Returned:
        llm = self._llms[begin.slot] = ProcessLLM(begin.slot, self._link)
        context = ProcessContext(begin, self._setup.timeout_s, self._marks)
        workflow = self._functions[0]
        try:
            trajectory = await workflow.call(begin.row, llm, context, **workflow.params)
            return _returned(begin.slot, trajectory, context.state)
        finally:
            del self._llms[begin.slot]

    async def _rate(self, rate: RateSamples) -> Rated:
        return self._rated(rate, await self._called(rate))

    def _call_plain(self, rate: RateSamples) -> None:
        self._marks.enter(rate.slot)
        ended: Rated | Failed
        try:
            ended = self._rated(rate, self._called(rate))
        except BaseException as error:  # even a sys.exit() in user code costs only its sample
            ended = self._raised(rate.slot, self._functions[rate.function], error)
        self._marks.leave()
        self._send(ended)

    def _called(self, rate: RateSamples) -> Any:
        function = self._functions[rate.function]
        return function.call(rate.samples if function.group else rate.samples[0], **function.params)

    def _rated(self, rate: RateSamples, answer: Any) -> Rated:
        function = self._functions[rate.function]
        return Rated(rate.slot, totals(function.name, answer, len(rate.samples), group=function.group))

    def _late(self, slot: int, function: UserFunction, error: BaseException) -> Failed:
        at = raised_at(error, function.home)
        return Failed(slot, self._setup.late, LossReason.TIMEOUT, at, traced(error, function.home))

    def _raised(self, slot: int, function: UserFunction, error: BaseException) -> Failed:
        at = ""
        with contextlib.suppress(MemoryError):
            at = raised_at(error, function.home)
        if isinstance(error, MemoryError):
            # The state of the process after a failed allocation is unknown, so the process makes no other call.
            self._link.send(frames.NoMemory(slot, at))
            os._exit(NO_MEMORY_STATUS)
        after_s = unavailable(error)
        kind = LossReason.RAISED if after_s is None else LossReason.JUDGE
        trace = traced(error, function.home)
        return Failed(slot, f"raised {type(error).__name__}: {error}", kind, at, trace, after_s or 0.0)

    def _send(self, ended: Returned | Rated | Failed) -> None:
        if self._offline is not None and (address := self._offline.taken()):
            ended = Failed(ended.slot, f"connects to {address}", LossReason.JUDGE)
        try:
            self._link.send(ended)
        except frames.UNFIT as error:
            why = f"{_UNFIT_RESULT[self._setup.purpose]}: {error}"
            self._link.send(Failed(ended.slot, why, LossReason.ANSWER))


def _returned(slot: int, trajectory: Any, state: dict[str, Any]) -> Returned:
    """Return the message for `trajectory`. Raises WorkflowError if the trajectory is invalid."""
    if not isinstance(trajectory, Trajectory):
        raise WorkflowError(f"returned {type(trajectory).__name__}, but must return a Trajectory (llm.trajectory())")
    score: Score | None = None if trajectory.reward is None else total(trajectory.reward)
    try:
        sequences = [
            Sequence(
                [int(number) for number in made.token_ids],
                [int(number) for number in made.loss_mask],
                [float(number) for number in made.logprobs],
                [int(number) for number in made.versions],
                [float(number) for number in made.rewards],
                [(int(turn), int(at)) for turn, at in made.turns],
            )
            for made in trajectory.sequences
        ]
        metrics = {str(name): float(value) for name, value in trajectory.metrics.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkflowError(f"metrics and a sequence's lists must contain numbers ({error})") from None
    return Returned(slot, sequences, score, metrics, state)


if __name__ == "__main__":
    main(*map(int, sys.argv[2:]))
