"""Tests tool calls between the real `openai` client and the endpoint.

A model of 0.8M parameters makes no tool calls, so the tests supply the sampled tokens; everything between the tokens
and the client is real.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.rollout.engine import Generation, Prompt, SamplingParams
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.conversation import Conversation, same
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from shared.workflow import Sequence
from tests.unit.rollout.rollout_engine import MODEL

openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TWICE = f"let me see {CALL} {CALL.replace('2', '1')}"
SAID = [f"let me see {CALL}", "3"]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """Return a builder that uses the shipped tokenizer, with braces in place of two of its characters."""
    folder = tmp_path_factory.mktemp("braces") / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"] = {{"$": "{", "#": "}"}.get(key, key): at for key, at in text["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return PromptBuilder(folder, add_generation_prompt=True)


class _Says:
    """A simulated engine that returns the given texts in order, each followed by EOS."""

    def __init__(self, prompts: PromptBuilder, said: list[str] = SAID) -> None:
        self._tokenizer = prompts._tokenizer
        self._said = said
        self.prompts: list[list[int]] = []

    async def sample(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        ids = self._tokenizer(self._said[len(self.prompts)])["input_ids"]
        self.prompts.append(list(prompt.token_ids))
        sampled = np.array([*ids, self._tokenizer.eos_token_id], np.int32)
        return Generation(sampled, np.full(len(sampled), -0.5, np.float32), "stop", np.zeros(len(sampled), np.int32))


async def _on_text(work: Callable[[], Any]) -> Any:
    return work()


def _calls(prompts: PromptBuilder, says: _Says) -> SampleCalls:
    return SampleCalls(
        "train/0/0/0",
        Conversation(prompts, context_tokens=512, max_tokens=1024, max_new_tokens=128),
        prompts=prompts,
        batcher=says,  # type: ignore[arg-type]
        sampling=SamplingParams(samples=1, temperature=1.0, max_new_tokens=128, seed=0),
        versions=BlockVersions(3, swaps=0),
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
def test_a_call_is_parsed_and_its_answer_continues_the_sampled_tokens(prompts: PromptBuilder, ask: Any) -> None:
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

    (sequence,) = asyncio.run(scenario())  # The returned call was recognised as the sampled one.
    assert says.prompts[1][: len(says.prompts[0])] == says.prompts[0]
    assert sequence.token_ids[: len(says.prompts[1])] == says.prompts[1]
    text = prompts._tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
    assert text == f"user: 1+2=\nassistant: {SAID[0]}\ntool: 3\nassistant: 3"
    sampled = [token for token, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True) if mask]
    assert prompts._tokenizer.decode(sampled, skip_special_tokens=True) == "".join(SAID)


def _parsed_arguments(message: dict[str, Any]) -> None:
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    message["content"] = [{"type": "text", "text": message["content"]}]


def _function(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda message: message["tool_calls"][0]["function"].update({name: value})


EDITS: list[tuple[str, Callable[[dict[str, Any]], Any], int]] = [
    ("none", lambda message: None, 1),
    ("another spelling", _parsed_arguments, 1),
    ("content", lambda message: message.update(content="EDITED"), 2),
    ("content dropped", lambda message: message.update(content=None), 2),
    ("content as sampled", lambda message: message.update(content=TWICE, tool_calls=message["tool_calls"][:1]), 2),
    ("function", _function("name", "sub"), 2),
    ("arguments", _function("arguments", '{"a": 999, "b": 2}'), 2),
    ("an argument's type", _function("arguments", '{"a": true, "b": 2}'), 2),
    ("arguments that are not JSON", _function("arguments", "{"), 2),
    ("a call dropped", lambda message: message["tool_calls"].pop(), 2),
    ("the first call dropped", lambda message: message["tool_calls"].pop(0), 2),
    ("an extra call", lambda message: message["tool_calls"].append(message["tool_calls"][0]), 2),
    ("an order", lambda message: message["tool_calls"].reverse(), 2),
    ("another id", lambda message: message["tool_calls"][1].update(id="call_9"), 2),
    ("all calls dropped", lambda message: message.pop("tool_calls"), 2),
]


@pytest.mark.parametrize(("edit", "sequences"), [each[1:] for each in EDITS], ids=[each[0] for each in EDITS])
def test_an_answer_opens_a_new_sequence_only_if_the_client_edited_it(
    prompts: PromptBuilder, edit: Callable[[dict[str, Any]], Any], sequences: int
) -> None:
    says = _Says(prompts, [TWICE, "3"])

    async def scenario() -> list[Sequence]:
        calls = _calls(prompts, says)
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.open(calls), api_key="any") as client:
                messages: list[Any] = [{"role": "user", "content": "1+2="}]
                first, _ = await _whole(client, messages)
                message = first.model_dump()
                edit(message)
                await _whole(client, [*messages, message, {"role": "user", "content": "go on"}])
        finally:
            await endpoint.stop()
        return calls.conversation.sequences()

    made = asyncio.run(scenario())
    assert len(made) == sequences
    assert made[-1].token_ids[: len(says.prompts[1])] == says.prompts[1]
    sampled = [token for each in made for token, mask in zip(each.token_ids, each.loss_mask, strict=True) if mask]
    assert prompts._tokenizer.decode(sampled, skip_special_tokens=True) == f"{TWICE}3"


@pytest.mark.parametrize("calls", ["add", [None], [{"function": "add"}]])
def test_tool_calls_of_an_unknown_shape_are_refused(prompts: PromptBuilder, calls: Any) -> None:
    async def scenario() -> None:
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        try:
            url = endpoint.open(_calls(prompts, _Says(prompts)))
            async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
                messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": calls}]
                with pytest.raises(openai.BadRequestError, match="tool_calls of a message must be a list of objects"):
                    await client.chat.completions.create(model="m", messages=messages)
        finally:
            await endpoint.stop()

    asyncio.run(scenario())


def test_parsed_calls_change_a_message_only_if_they_differ_from_those_in_its_text() -> None:
    text = {"role": "assistant", "content": TWICE}
    calls = [{"id": "a", "function": {"name": "add", "arguments": {"a": 1, "b": number}}} for number in (2, 1)]
    assert same(text, {**text, "tool_calls": calls, "refusal": None})
    assert not same(text, {**text, "tool_calls": calls[:1]})
    assert not same(text, {**text, "tool_calls": calls[::-1]})
    assert not same({"role": "user", "content": TWICE}, {"role": "user", "content": TWICE, "tool_calls": calls})


def test_a_call_is_returned_as_text_if_the_request_has_no_tools(prompts: PromptBuilder) -> None:
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
