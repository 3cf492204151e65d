"""One attempt at a workflow sample: the policy calls that the workflow's code makes in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.rollout.sampling.tasks import ReadyTask
from services.rollout.user_code import frames
from services.rollout.user_code.host import UserHost
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from shared.workflow import ContextFull, Sequence, Turn, WorkflowError


class Attempt:
    """An attempt at sample number `sample` of a task, as work for a process (`user_code.host.Work`)."""

    function = 0

    def __init__(self, task: ReadyTask, sample: int, calls: SampleCalls, endpoint: OpenAIEndpoint) -> None:
        self.calls = calls
        self._task = task
        self._sample = sample
        self._endpoint = endpoint
        self._under_way: dict[int | None, asyncio.Task[None]] = {}

    def begin(self, slot: int) -> frames.BeginSample:
        base_url = self._endpoint.open(self.calls)
        return frames.BeginSample(slot, self._task.handle.task_id, self._sample, self._task.row, base_url)

    def asked(self, message: frames.Asked, host: UserHost) -> None:
        match message:
            case frames.Chat() | frames.CompleteText():
                self._start(message.call, self._answer(message, host))
            case frames.Leave():
                if message.call in self._under_way:
                    self._under_way[message.call].cancel()
            case frames.Ask():
                self._start(None, self._send_captured(message.slot, host))

    def end(self) -> None:
        self.calls.closed = f"the sample {self.calls.name} has ended"
        self._endpoint.close(self.calls)
        for call in list(self._under_way.values()):
            call.cancel()

    def _start(self, call: int | None, work: Coroutine[Any, Any, None]) -> None:
        task = self._under_way[call] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._under_way.pop(call, None))

    async def _send_captured(self, slot: int, host: UserHost) -> None:
        def framed(sequences: list[Sequence]) -> bytes:
            return frames.frame(frames.Captured(slot, sequences), frames.TO_PROCESS_BYTES)

        try:
            host.write(await self.calls.captured(framed))
        except asyncio.CancelledError:  # abandoned, but the whole process is waiting for this answer
            host.write(framed([]))

    async def _answer(self, asked: frames.Chat | frames.CompleteText, host: UserHost) -> None:
        turn: Turn | None = None
        refused = why = ""
        try:
            if isinstance(asked, frames.Chat):
                turn = await self.calls.chat(asked.messages, asked.tools)
            else:
                turn = await self.calls.complete(asked.prompt)
        except (ContextFull, WorkflowError) as error:
            refused, why = type(error).__name__, str(error)
        except Exception as error:  # an error of the call, raised in the workflow
            why = f"{type(error).__name__}: {error}"
        host.send(frames.Answered(asked.slot, asked.call, turn, refused, why))
