"""Workflows around unmodified agents that use OpenAI's chat completions. The agents themselves import no module of this
repository."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai

from shared.workflow import LLM, Context, ContextFull, Trajectory

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculator", "description": "adds", "parameters": {"type": "object"}}}
]
Row = dict[str, Any]


def client_of(ctx: Context) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=ctx.base_url, api_key="any")


async def agent(base_url: str, question: str) -> list[str]:
    """Run a plain two-turn agent."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        answers = []
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, temperature=0.2, logprobs=True
            )
            choice = answer.choices[0]
            messages += [choice.message, {"role": "user", "content": "again"}]
            answers.append(choice.message.content or "")
            assert choice.finish_reason in ("stop", "length")
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert answer.usage is not None
            assert len(choice.logprobs.content) == answer.usage.completion_tokens
        return answers


async def two_turns(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    ctx.state["answers"] = await agent(ctx.base_url, row["prompt"])
    return llm.trajectory()


async def blocking(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Run, on a thread, an agent that does not use asyncio."""

    def ask() -> str:
        with openai.OpenAI(base_url=ctx.base_url, api_key="any") as client:
            messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
            answer = client.chat.completions.create(model="gpt-4o", messages=messages)
            return answer.choices[0].message.content or ""

    ctx.state["answer"] = await ctx.call(ask)
    return llm.trajectory()


async def streaming(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    async with client_of(ctx) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": row["prompt"]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    ctx.state["text"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    ctx.state["finish"] = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
    ctx.state["usage"] = chunks[-1].usage.completion_tokens if chunks[-1].usage else -1
    return llm.trajectory()


async def choices(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Request three answers at once and continue from the second."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    async with client_of(ctx) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, n=3)
        ctx.state["indices"] = [choice.index for choice in answer.choices]
        ctx.state["texts"] = [choice.message.content for choice in answer.choices]
        again = {"role": "user", "content": "again"}
        await client.chat.completions.create(model="m", messages=[*messages, answer.choices[1].message, again])
    return llm.trajectory()


async def shortened(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    async with client_of(ctx) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": row["prompt"]}],
            max_tokens=2,
            temperature=0.1,
            top_p=0.5,
            seed=1,
        )
        ctx.state["overridden"] = raw.headers["x-overridden"]
        usage = raw.parse().usage
        ctx.state["tokens"] = usage.completion_tokens if usage else -1
        assert (await client.models.list()).data[0].id == "tiny"
    return llm.trajectory()


async def refused(row: Row, llm: LLM, ctx: Context, *, asked: list[dict[str, Any]]) -> Trajectory:
    """Send the requests `asked` in order and record the error with which each one is refused."""
    ctx.state["errors"] = []
    async with client_of(ctx) as client:
        for each in asked:
            fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}], **each}
            try:
                await client.chat.completions.create(**fields)
            except openai.BadRequestError as error:
                ctx.state["errors"].append([error.message, error.type, error.code])
            else:
                ctx.state["errors"].append(["not refused", None, None])
    await llm.chat([{"role": "user", "content": "1"}])
    return llm.trajectory()


async def notes_url(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    ctx.state["urls"] = [ctx.base_url, ctx.base_url]
    await llm.chat([{"role": "user", "content": "1"}])
    return llm.trajectory()


async def goes_away(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Abandon three concurrent calls, then use all the space that they held."""
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
        except ContextFull:  # The abandoned calls still hold their space.
            await asyncio.sleep(0.02)
