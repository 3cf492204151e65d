"""An unmodified agent, which only knows OpenAI's chat completions, as a workflow: everything it samples is captured."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from services.rollout.workflows.runner import Made
from shared.workflow import LLM, Context, ContextFull, Trajectory
from tests.unit.workflow_rig import VERSION, Rig, logprob_error, rig, run

openai = pytest.importorskip("openai")

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calculator", "description": "adds", "parameters": {"type": "object"}}}
]


async def agent(base_url: str, question: str) -> list[str]:
    """A plain agent of two turns. It imports nothing of ours."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        answers = []
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, temperature=0.2, logprobs=True
            )
            choice = answer.choices[0]
            messages += [choice.message, {"role": "user", "content": "again"}]
            answers.append(choice.message.content)
            assert choice.finish_reason in ("stop", "length")
            assert len(choice.logprobs.content) == answer.usage.completion_tokens
        return answers


async def with_agent(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
    ctx.state["answers"] = await agent(ctx.base_url, row["prompt"])
    return llm.trajectory()


def only(made: list[list[Made]]) -> Made:
    ((one,),) = made
    assert one.score is None, one.score
    return one


def test_tokens_and_logprobs_of_an_unmodified_agent_are_captured_for_each_sample() -> None:
    made, blocks, _ = run(with_agent, tasks=2, samples=4, timeout_s=60)
    assert sum(blocks) == 16
    for group in made:
        for each in group:
            assert each.score is None, each.score
            (sequence,) = each.rolled.sequences
            mask = sequence.loss_mask == 1
            assert logprob_error(sequence) < 1e-4
            assert set(sequence.versions[mask]) == {VERSION}
            # Two stretches of sampled tokens: the history came back over HTTP and continued the same sequence.
            assert (np.diff(sequence.loss_mask.astype(int)) == 1).sum() == 2
            assert each.sample.completion == each.sample.state["answers"][1]


def test_a_stream_says_the_same_as_the_whole_answer() -> None:
    async def workflow(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key="any") as client:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": row["prompt"]}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        ctx.state["text"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        ctx.state["finish"] = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
        ctx.state["usage"] = chunks[-1].usage.completion_tokens
        return llm.trajectory()

    made = only(run(workflow, tasks=1, samples=1)[0])
    assert made.sample.state["text"] == made.sample.completion
    assert made.sample.state["finish"] == made.sample.finish_reason
    assert made.sample.state["usage"] == made.rolled.sampled


def test_max_tokens_and_stop_shorten_an_answer_and_sampling_is_the_topologys() -> None:
    async def workflow(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key="any") as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="m",
                messages=[{"role": "user", "content": row["prompt"]}],
                max_tokens=2,
                temperature=0.1,
                top_p=0.5,
                seed=1,
            )
            ctx.state["overridden"] = raw.headers["x-overridden"]
            ctx.state["tokens"] = raw.parse().usage.completion_tokens
            assert (await client.models.list()).data[0].id == "tiny"
        return llm.trajectory()

    made = only(run(workflow, tasks=1, samples=1)[0])
    assert made.sample.state == {"overridden": "temperature,top_p,seed", "tokens": made.rolled.sampled}
    assert made.rolled.sampled <= 2
    assert logprob_error(made.rolled.sequences[0]) < 1e-4  # at the topology's temperature, 1.0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"n": 2}, "a call makes one choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "1" * 600}]}, "leaves no room in the model's context of 512"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked: dict[str, Any], says: str) -> None:
    async def workflow(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key="any") as client:
            fields = {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}], **asked}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**fields)
            ctx.state["error"] = str(caught.value)
        await llm.chat([{"role": "user", "content": "1"}])
        return llm.trajectory()

    assert says in only(run(workflow, tasks=1, samples=1)[0]).sample.state["error"]


def test_a_url_is_worth_nothing_to_others_and_after_the_sample() -> None:
    urls: list[str] = []

    async def workflow(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
        urls.append(ctx.base_url)
        assert ctx.base_url == urls[-1]
        await llm.chat([{"role": "user", "content": "1"}])
        return llm.trajectory()

    async def scenario() -> None:
        async with rig() as made:
            await made.make(workflow, tasks=1, samples=2)
            assert len(set(urls)) == 2
            assert all(url.startswith("http://127.0.0.1:") for url in urls)
            for url in (urls[0], urls[0].rpartition("/s/")[0] + "/s/guess/v1"):
                async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
                    with pytest.raises(openai.NotFoundError, match="no sample is made at this address"):
                        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}])

    asyncio.run(scenario())


async def raw(made: Rig, data: bytes) -> bytes:
    url = made.endpoint.open(object())  # type: ignore[arg-type]  # an address nobody calls
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    writer.write(data)
    writer.write_eof()
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100000,
        bytes(range(256)) * 100,
    ],
)
def test_bytes_that_are_no_request_end_their_connection_only(data: bytes) -> None:
    async def scenario() -> None:
        async with rig() as made:
            answer = await raw(made, data)
            assert answer == b"" or answer.split(b" ")[1] in (b"400", b"404")
            assert b"404" in (await raw(made, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).split(b"\r\n")[0]

    asyncio.run(scenario())


def test_an_agent_that_goes_away_leaves_nothing_behind() -> None:
    async def workflow(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
        body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
        host, _, rest = ctx.base_url.removeprefix("http://").partition("/")
        for _ in range(3):
            _, writer = await asyncio.open_connection(*host.split(":"))
            head = f"POST /{rest}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()
        while True:
            try:
                await llm.chat([{"role": "user", "content": row["prompt"]}])
                return llm.trajectory()
            except ContextFull:  # the calls that were left still hold their room
                await asyncio.sleep(0.02)

    # Room for one call only: those that were left have given theirs back, and nothing of theirs is trained on.
    made = only(run(workflow, tasks=1, samples=1, max_tokens=40, timeout_s=10)[0])
    assert len(made.rolled.sequences) == 1
