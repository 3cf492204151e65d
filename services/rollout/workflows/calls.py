"""The service's side of one sample's calls: it encodes the history, samples with the engine, and decodes the tokens.

It is used only on the service's loop and runs no user code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from services.rollout.engine import Prompt, SamplingParams
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import OnText
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.workflows.batching import CallBatcher
from services.rollout.workflows.conversation import Conversation, PreparedCall
from shared.openai_api.tools import tool_calls
from shared.workflow import Message, Sequence, Turn, WorkflowError

T = TypeVar("T")


class SampleCalls:
    """Policy calls for one sample, sequential or concurrent. All of them are captured."""

    def __init__(
        self,
        name: str,
        conversation: Conversation,
        *,
        prompts: PromptBuilder,
        batcher: CallBatcher,
        sampling: SamplingParams,
        versions: BlockVersions,
        on_text: OnText,
    ) -> None:
        """`name` is the sample's name, unique in the run. `versions` holds the engine's versions during the lease."""
        self.name = name
        self.conversation = conversation
        self._prompts = prompts
        self._batcher = batcher
        self._sampling = sampling
        self._versions = versions
        self._on_text = on_text
        self._calls = 0
        self._giving_up: set[asyncio.Task[None]] = set()
        self.closed = ""
        """The reason why calls are no longer accepted, or an empty string while they are."""

    @property
    def temperature(self) -> float:
        """The sampling temperature of every call."""
        return self._sampling.temperature

    async def chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> Turn:
        """Return the policy's answer. `max_new_tokens` and `stop` may shorten it further than the topology does.

        Raises ContextFull and WorkflowError.
        """
        self._check_open()
        call = await self._begin(lambda: self.conversation.begin(messages, tools or None))
        return await self._sample(call, max_new_tokens, stop)

    async def complete(self, prompt: str) -> Turn:
        """Return the policy's continuation of raw text. Raises the same errors as `chat`."""
        self._check_open()
        call = await self._begin(lambda: self.conversation.begin_text(prompt))
        return await self._sample(call, None, ())

    async def captured(self, take: Callable[[list[Sequence]], T]) -> T:
        """Call `take` on the text thread with everything sampled so far, and return its result."""
        taken: T = await self._on_text(lambda: take(self.conversation.sequences()))
        return taken

    async def _begin(self, begin: Callable[[], PreparedCall]) -> PreparedCall:
        """Run `begin` on the text thread. If the caller is cancelled in the meantime, the opened call is abandoned."""
        beginning: asyncio.Future[PreparedCall] = asyncio.ensure_future(self._on_text(begin))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._give_up_unsampled)
            raise

    def _give_up_unsampled(self, beginning: asyncio.Future[PreparedCall]) -> None:
        if not beginning.cancelled() and beginning.exception() is None:
            self._give_up(beginning.result())

    def _give_up(self, call: PreparedCall) -> asyncio.Task[None]:
        """Release the tokens reserved for the call, even if the caller is cancelled in the meantime."""

        async def give_up() -> None:
            await self._on_text(lambda: self.conversation.give_up(call))

        task = asyncio.create_task(give_up())
        self._giving_up.add(task)
        task.add_done_callback(self._giving_up.discard)
        return task

    async def _sample(self, call: PreparedCall, max_new_tokens: int | None, stop: tuple[str, ...]) -> Turn:
        conversation = self.conversation
        self._calls += 1
        room = conversation.room(call)
        sampling = replace(
            self._sampling,
            samples=1,
            block_rows=0,
            max_new_tokens=min(room, max_new_tokens or room),
            stop=(*self._sampling.stop, *stop),
        )
        try:
            generation = await self._batcher.sample(Prompt(f"{self.name}/{self._calls}", call.prompt_ids), sampling)
            self._check_open()
            token_ids = generation.token_ids.tolist()
            versions: list[int] = self._versions.of(generation.swaps).tolist()
        except BaseException:
            await asyncio.shield(self._give_up(call))
            raise
        left = threading.Event()

        def end() -> str:
            if left.is_set():
                conversation.give_up(call)
                return ""
            answer = self._prompts.completion(token_ids, sampling.stop)
            conversation.end(call, generation, versions, answer)
            return answer

        try:
            text: str = await asyncio.shield(asyncio.ensure_future(self._on_text(end)))
        except asyncio.CancelledError:
            left.set()
            raise
        return Turn(
            text=text,
            token_ids=token_ids,
            logprobs=generation.logprobs.tolist(),
            versions=versions,
            finish_reason=generation.finish_reason,
            prompt_tokens=len(call.prompt_ids),
            tool_calls=tool_calls(text),
        )

    def _check_open(self) -> None:
        if self.closed:
            raise WorkflowError(self.closed)
