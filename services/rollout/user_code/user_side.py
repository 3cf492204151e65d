"""The socket through which a process that runs users' code reaches the service, and the objects through which a
workflow in it uses the service.

None of these objects outlives the workflow's sample. The process exits when the service is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from services.rollout.user_code.confined import grow_limit
from services.rollout.user_code.frames import (
    LENGTH,
    TO_SERVICE_BYTES,
    UNFIT,
    Answered,
    Ask,
    BeginSample,
    Captured,
    Chat,
    CompleteText,
    Leave,
    Marks,
    ToProcess,
    ToService,
    frame,
)
from shared.workflow import ContextFull, Message, Sequence, Trajectory, Turn, WorkflowError, place_rewards

T = TypeVar("T")
TOOL_STACK_BYTES = 4 << 20
REFUSALS: dict[str, type[Exception]] = {error.__name__: error for error in (ContextFull, WorkflowError)}
"""Errors with which the service may refuse a call. Any other error is raised as a RuntimeError."""
READ_BYTES = 1 << 18


class Link:
    """A connection to the service. Messages are passed to `take` on `loop`."""

    def __init__(
        self, socket_: socket.socket, loop: asyncio.AbstractEventLoop, take: Callable[[ToProcess], None]
    ) -> None:
        """`take` is called on the loop with every message that is not an answer to `captured`."""
        self._socket = socket_
        self._on_message = take
        self._loop = loop
        self._decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
        self._buffer = bytearray()
        self._inbox: deque[ToProcess] = deque()
        self._reading = threading.RLock()
        self._writing = threading.Lock()
        self._loop.add_reader(socket_.fileno(), self._readable)

    def send(self, message: ToService) -> None:
        """Send a message, from any thread. Raises the errors of `frame`."""
        data = frame(message, TO_SERVICE_BYTES)
        with self._writing:
            self._socket.sendall(data)

    def captured(self, slot: int) -> list[Sequence]:
        """Return everything sampled for `slot`. Any thread may call this; other messages wait in the meantime."""
        with self._reading:
            self.send(Ask(slot))
            while True:
                self._receive(0)
                answer: Captured | None = None
                for message in self._complete_messages():
                    if isinstance(message, Captured):
                        answer = message
                    else:
                        self._inbox.append(message)
                if answer is not None:
                    self._loop.call_soon_threadsafe(self._drain)
                    return answer.sequences

    def _readable(self) -> None:
        with self._reading:
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:  # `captured` has read the data
                return
            self._inbox.extend(self._complete_messages())
        self._drain()

    def _drain(self) -> None:
        while self._inbox:
            self._on_message(self._inbox.popleft())

    def _receive(self, flags: int) -> None:
        data = self._socket.recv(READ_BYTES, flags)
        if not data:
            os._exit(0)  # the service is gone; exit without running user code
        self._buffer += data

    def _complete_messages(self) -> list[ToProcess]:
        """Remove and return the complete messages in the buffer."""
        messages: list[ToProcess] = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, at)
            if len(self._buffer) - at - LENGTH.size < length:
                break
            at += LENGTH.size
            messages.append(self._decoder.decode(memoryview(self._buffer)[at : at + length]))
            at += length
        del self._buffer[:at]
        return messages


class ProcessLLM:
    """Implements `shared.workflow.LLM`. Calls may come from any thread and any loop."""

    def __init__(self, slot: int, link: Link) -> None:
        self._slot = slot
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Turn]] = {}

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Turn:
        return await self._call_on_own_loop(lambda call: Chat(self._slot, call, messages, tools))

    async def complete(self, prompt: str) -> Turn:
        return await self._call_on_own_loop(lambda call: CompleteText(self._slot, call, prompt))

    def trajectory(
        self,
        reward: float | dict[str, float | str] | None = None,
        metrics: dict[str, float] | None = None,
        turn_rewards: list[float] | None = None,
    ) -> Trajectory:
        sequences = self._link.captured(self._slot)
        if turn_rewards is not None:
            place_rewards(sequences, turn_rewards)
        return Trajectory(sequences, reward, dict(metrics or {}))

    def deliver(self, answer: Answered) -> None:
        """Deliver the service's answer to a call."""
        waiting = self._waiting.get(answer.call)
        if waiting is None or waiting.done():
            return
        if answer.turn is not None:
            waiting.set_result(answer.turn)
        else:
            waiting.set_exception(REFUSALS.get(answer.refused, RuntimeError)(answer.why))

    async def _call_on_own_loop(self, make: Callable[[int], Chat | CompleteText]) -> Turn:
        if asyncio.get_running_loop() is self._loop:
            return await self._call(make)
        turn: Turn = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(make), self._loop))
        return turn

    async def _call(self, make: Callable[[int], Chat | CompleteText]) -> Turn:
        call = next(self._numbers)
        try:
            self._link.send(make(call))
        except UNFIT as error:
            raise WorkflowError(
                f"a call cannot be sent, because messages must consist of JSON values: {error}"
            ) from None
        answer: asyncio.Future[Turn] = self._loop.create_future()
        self._waiting[call] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._link.send(Leave(self._slot, call))
            raise
        finally:
            del self._waiting[call]


@functools.cache
def openai_client() -> Any:
    """Return this process's client of the OpenAI API. Raises WorkflowError if the package is not installed.

    Importing the package and making a client take longer than the loop may be busy (up to seconds on a loaded machine),
    so a process whose workflow uses `ctx.openai` calls this before its first sample.
    """
    try:
        import openai
    except ModuleNotFoundError as error:
        raise WorkflowError(f"ctx.openai needs the package {error.name}; run `make setup-agents`") from None
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


def uses_openai(workflow: Callable[..., Any]) -> bool:
    """Return whether the module that defines a workflow has the package openai, or reads an attribute of that name."""
    if "openai" in sys.modules:
        return True
    module = sys.modules.get(getattr(workflow, "__module__", ""))
    with contextlib.suppress(OSError, TypeError):
        return module is not None and ".openai" in inspect.getsource(module)
    return False


class ProcessContext:
    """Implements `shared.workflow.Context`."""

    def __init__(self, begin: BeginSample, timeout_s: float, marks: Marks) -> None:
        self.task_id = begin.task_id
        self.sample = begin.sample
        self.base_url = begin.base_url
        self.state: dict[str, Any] = {}
        self._slot = begin.slot
        self._marks = marks
        self._deadline = time.monotonic() + timeout_s

    @property
    def openai(self) -> Any:
        return openai_client().with_options(base_url=self.base_url)

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
            finally:
                self._marks.tool(self._slot, -1)
                loop.call_soon_threadsafe(grow_limit, -TOOL_STACK_BYTES)

        # Each call has its own thread, because a tool that hangs would occupy a place in a pool. The stack of such a
        # thread is only reserved memory.
        grow_limit(TOOL_STACK_BYTES)
        self._marks.tool(self._slot, 1)
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
        limit_s = self.remaining_s if timeout_s is None else min(timeout_s, self.remaining_s)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"tool {tool!r:.60} gave no answer within {limit_s:.3g} s") from None
