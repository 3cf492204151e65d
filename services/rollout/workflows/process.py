"""A workflow process: `python -m services.rollout.workflows.process SOCKET MARKS`.

It loads the workflow and runs samples as tasks of one loop. The service kills it when it hangs and does not rely on it
to exit. It does not import torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import sys
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

from services.rollout.confined import confine, limit_memory, read
from services.rollout.rewards.score import Score, total
from services.rollout.user_frames import TO_SERVICE_BYTES, UNFIT, frame
from services.rollout.user_trace import home_of, raised_at, traced
from services.rollout.workflows.frames import (
    Begin,
    Captured,
    Failed,
    GiveUp,
    NoMemory,
    Ping,
    Pong,
    Ready,
    Returned,
    Setup,
    ToProcess,
)
from services.rollout.workflows.link import Link
from services.rollout.workflows.load import Workflow, load_workflow
from services.rollout.workflows.marks import Marks
from services.rollout.workflows.user_side import TOOL_STACK_BYTES, ProcessContext, ProcessLLM
from shared.rpc.errors import RpcError
from shared.workflow import Sequence, Trajectory, WorkflowError

NO_MEMORY_STATUS = 70
_SLOT: contextvars.ContextVar[int] = contextvars.ContextVar("slot")


def main(descriptor: int, marks: int) -> None:
    """Serve the service at the other end of the socket until it closes."""
    link = confine(descriptor)
    setup = read(link, Setup) if link is not None else None
    if link is None or setup is None:
        return
    try:
        workflow = load_workflow(setup.function, setup.params)
    except RpcError as error:
        link.sendall(frame(Ready(str(error)), TO_SERVICE_BYTES))
        return
    threading.stack_size(TOOL_STACK_BYTES)
    limit_memory(setup.memory_bytes)
    link.sendall(frame(Ready(), TO_SERVICE_BYTES))
    asyncio.run(_serve(link, Marks(marks), workflow, setup.timeout_s))


async def _serve(socket_: socket.socket, marks: Marks, workflow: Workflow, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    samples = _Samples(marks, workflow, timeout_s)
    loop.set_task_factory(samples.make_task)
    loop.set_exception_handler(_no_memory_ends)
    samples.link = Link(socket_, samples.take)
    await asyncio.Event().wait()


def _no_memory_ends(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exit on a MemoryError: a callback that ran out of memory may have lost a message."""
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
        self._marks.enter(self._slot)
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:  # in a task, these would end the loop of all samples
            raise RuntimeError(repr(error)) from None
        finally:
            self._marks.leave()

    def throw(self, *error: Any) -> Any:
        self._marks.enter(self._slot)
        try:
            return self._inner.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise RuntimeError(repr(raised)) from None
        finally:
            self._marks.leave()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


class _Samples:
    """The samples in progress."""

    link: Link

    def __init__(self, marks: Marks, workflow: Workflow, timeout_s: float) -> None:
        self._marks = marks
        self._workflow = workflow
        self._timeout_s = timeout_s
        self._home = home_of(getattr(workflow, "func", workflow))  # without the partial that binds its params
        self._calls: dict[int, ProcessLLM] = {}
        self._tasks: dict[int, weakref.WeakSet[asyncio.Task[Any]]] = {}

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Make a task (the loop's task factory). Tasks that a sample starts are marked and cancelled with its slot."""
        slot = (context.get(_SLOT) if context is not None else None) or _SLOT.get(0)
        if not slot:
            return asyncio.Task(coroutine, loop=loop, context=context)
        task = asyncio.Task(_Marked(coroutine, slot, self._marks), loop=loop, context=context)
        self._tasks.setdefault(slot, weakref.WeakSet()).add(task)
        return task

    def take(self, message: ToProcess) -> None:
        """Handle a message from the service."""
        if isinstance(message, Begin):
            context = contextvars.copy_context()
            context.run(_SLOT.set, message.slot)
            asyncio.get_running_loop().create_task(self._run(message), context=context)
        elif isinstance(message, GiveUp):
            self._end(message.slot)
        elif isinstance(message, Ping):
            self.link.send(Pong())
        elif not isinstance(message, Captured) and message.slot in self._calls:
            self._calls[message.slot].said(message)

    def _end(self, slot: int) -> None:
        """Cancel all tasks of the slot. The service finds those that ignore the cancellation."""
        for task in list(self._tasks.pop(slot, ())):
            task.cancel()

    async def _run(self, begin: Begin) -> None:
        llm = self._calls[begin.slot] = ProcessLLM(begin.slot, self.link)
        context = ProcessContext(begin, self._timeout_s, self._marks)
        try:
            ended: Returned | Failed = await self._made(begin, llm, context)
        except MemoryError:
            # The state of the process after a failed allocation is unknown: no other sample is made in it.
            self.link.send(NoMemory(begin.slot))
            os._exit(NO_MEMORY_STATUS)
        except asyncio.CancelledError:
            ended = Failed(begin.slot, "was cancelled")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # anything that user code raises
            ended = self._failed(begin, f"raised {type(error).__name__}: {error}", error)
        finally:
            del self._calls[begin.slot]
        try:
            self.link.send(ended)
        except UNFIT as error:
            why = f"returned what cannot be handed over, only what JSON has may be in ctx.state: {error}"
            self.link.send(Failed(begin.slot, why))
        self._end(begin.slot)

    async def _made(self, begin: Begin, llm: ProcessLLM, context: ProcessContext) -> Returned | Failed:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                trajectory = await self._workflow(begin.row, llm, context)
        except TimeoutError as error:
            if deadline.expired():
                return self._failed(begin, f"no trajectory within {self._timeout_s:g} s (workflow.timeout_s)", error)
            return self._failed(
                begin, f"raised TimeoutError: {error}", error
            )  # raised by a tool, and not caught by the workflow
        return _returned(begin.slot, trajectory, context.state)

    def _failed(self, begin: Begin, why: str, error: BaseException) -> Failed:
        return Failed(begin.slot, why, raised_at(error, self._home), traced(error))


def _returned(slot: int, trajectory: Any, state: dict[str, Any]) -> Returned:
    """Return the message for `trajectory`. Raises WorkflowError if it is not a valid one."""
    if not isinstance(trajectory, Trajectory):
        raise WorkflowError(f"returned {type(trajectory).__name__}, must return a Trajectory (llm.trajectory())")
    score: Score | None = None if trajectory.reward is None else total(trajectory.reward)
    try:
        sequences = [
            Sequence(
                [int(each) for each in made.token_ids],
                [int(each) for each in made.loss_mask],
                [float(each) for each in made.logprobs],
                [int(each) for each in made.versions],
            )
            for made in trajectory.sequences
        ]
        metrics = {str(name): float(value) for name, value in trajectory.metrics.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkflowError(f"a sequence's lists, and metrics, must hold numbers ({error})") from None
    return Returned(slot, sequences, score, metrics, state)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
