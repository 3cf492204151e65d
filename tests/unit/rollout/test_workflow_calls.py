"""When a caller leaves, at whatever moment, its call frees the room that it held and is not trained on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from services.rollout.engine import Generation, Prompt, SamplingParams
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.conversation import Conversation
from shared.workflow import ContextFull, Turn
from tests.unit.rollout.workflow_rig import MODEL

MESSAGES = [{"role": "user", "content": "12+34="}]


class _Answers:
    """A batcher whose engine always samples the same two tokens."""

    async def sample(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        return Generation(np.array([5, 6], np.int32), np.zeros(2, np.float32), "stop", np.zeros(2, np.int32))


class _Thread:
    """A text thread that pauses before the `stop_at`-th piece of work until `go_on` is set."""

    def __init__(self, stop_at: int) -> None:
        self._left = stop_at
        self._executor = ThreadPoolExecutor(1)
        self.reached = threading.Event()
        self.go_on = threading.Event()

    async def __call__(self, work: Callable[[], Any]) -> Any:
        self._left -= 1
        stopped = self._left == 0

        def run() -> Any:
            if stopped:
                self.reached.set()
                assert self.go_on.wait(30)
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._executor, run)


async def until_there_is_room(calls: SampleCalls) -> Turn:
    while True:
        with contextlib.suppress(ContextFull):
            return await calls.chat(MESSAGES, None)
        await asyncio.sleep(0)


@pytest.mark.parametrize("stop_at", [1, 2], ids=["while its call is started", "while its answer is added"])
def test_an_abandoned_call_frees_its_place_for_the_next_call(stop_at: int) -> None:
    async def scenario() -> None:
        thread = _Thread(stop_at)
        # There is room for only one call.
        prompts = PromptBuilder(MODEL, add_generation_prompt=True)
        conversation = Conversation(prompts, context_tokens=512, max_tokens=40, max_new_tokens=8)
        calls = SampleCalls(
            "train/0/0/0",
            conversation,
            prompts=prompts,
            batcher=_Answers(),  # type: ignore[arg-type]
            sampling=SamplingParams(samples=1, temperature=1.0, max_new_tokens=8, seed=0),
            versions=BlockVersions(3, 0),
            on_text=thread,
        )
        left = asyncio.create_task(calls.chat(MESSAGES, None))
        assert await asyncio.to_thread(thread.reached.wait, 30)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        thread.go_on.set()
        async with asyncio.timeout(20):
            assert (await until_there_is_room(calls)).token_ids == [5, 6]
        assert len(conversation.sequences()) == 1

    asyncio.run(scenario())
