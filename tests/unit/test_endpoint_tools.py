"""Tool calls between the real `openai` client and the endpoint. No model of 0.8M parameters makes a call of its own
accord: what is sampled is given, token by token; everything between the tokens and the client is real."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.rollout.engine import Generation, Prompt, SamplingParams
from services.rollout.openai_endpoint import OpenAIEndpoint
from services.rollout.prompts import PromptBuilder
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.conversation import Conversation
from shared.workflow import Sequence
from tests.unit.rollout_engine import MODEL

openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SAID = [f"let me see {CALL}", "3"]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """The shipped tokenizer with braces in the place of two signs."""
    folder = tmp_path_factory.mktemp("braces") / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"] = {{"$": "{", "#": "}"}.get(key, key): at for key, at in text["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return PromptBuilder(folder, add_generation_prompt=True)


class _Says:
    """In the place of the engine: SAID, one after the other, each with its EOS."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._tokenizer = prompts._tokenizer
        self.prompts: list[list[int]] = []

    async def sample(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        ids = self._tokenizer(SAID[len(self.prompts)])["input_ids"]
        self.prompts.append(list(prompt.token_ids))
        sampled = np.array([*ids, self._tokenizer.eos_token_id], np.int32)
        return Generation(sampled, np.full(len(sampled), -0.5, np.float32), "stop")


async def _on_text(work: Callable[[], Any]) -> Any:
    return work()


def _calls(prompts: PromptBuilder, says: _Says) -> SampleCalls:
    return SampleCalls(
        "train/0/0/0",
        Conversation(prompts, context_tokens=512, max_tokens=1024, max_new_tokens=128),
        prompts=prompts,
        batcher=says,  # type: ignore[arg-type]
        sampling=SamplingParams(samples=1, temperature=1.0, max_new_tokens=128, seed=0),
        version=3,
        on_text=_on_text,
    )


async def _whole(client: Any, messages: list[Any]) -> tuple[Any, str]:
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    return answer.choices[0].message, answer.choices[0].finish_reason


async def _streamed(client: Any, messages: list[Any]) -> tuple[Any, str]:
    stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream]
    delta = chunks[0].choices[0].delta
    message: dict[str, Any] = {"role": "assistant", "content": delta.content}
    if delta.tool_calls:
        message["tool_calls"] = [each.model_dump(exclude={"index"}, exclude_none=True) for each in delta.tool_calls]
    return openai.types.chat.ChatCompletionMessage(**message), chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("ask", [_whole, _streamed])
def test_a_call_comes_parsed_and_its_answer_continues_the_sampled_tokens(prompts: PromptBuilder, ask: Any) -> None:
    says = _Says(prompts)

    async def scenario() -> list[Sequence]:
        calls = _calls(prompts, says)
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.open(calls), api_key="any") as client:
                messages: list[Any] = [{"role": "user", "content": "1+2="}]
                first, why = await ask(client, messages)
                assert why == "tool_calls"
                assert first.content == "let me see"
                (call,) = first.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
                messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
                second, why = await ask(client, messages)
                assert (why, second.content, second.tool_calls) == ("stop", "3", None)
        finally:
            await endpoint.stop()
        return calls.conversation.sequences()

    (sequence,) = asyncio.run(scenario())  # the parsed call came back and was known for what had been sampled
    assert says.prompts[1][: len(says.prompts[0])] == says.prompts[0]
    assert sequence.token_ids[: len(says.prompts[1])] == says.prompts[1]
    text = prompts._tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
    assert text == f"user: 1+2=\nassistant: {SAID[0]}\ntool: 3\nassistant: 3"
    sampled = [token for token, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True) if mask]
    assert prompts._tokenizer.decode(sampled, skip_special_tokens=True) == "".join(SAID)


def test_without_tools_a_call_is_text(prompts: PromptBuilder) -> None:
    async def scenario() -> Any:
        calls = _calls(prompts, _Says(prompts))
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.open(calls), api_key="any") as client:
                messages: list[Any] = [{"role": "user", "content": "1+2="}]
                answer = await client.chat.completions.create(model="m", messages=messages)
                return answer.choices[0]
        finally:
            await endpoint.stop()

    choice = asyncio.run(scenario())
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", SAID[0], None)
