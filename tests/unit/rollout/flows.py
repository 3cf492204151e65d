"""Provides workflows for tests, which workflow processes import by path. This module avoids slow imports."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import time
from pathlib import Path
from typing import Any

from shared.workflow import LLM, Context, ContextFull, Message, Trajectory

Row = dict[str, Any]


def prompt_of(row: Row) -> list[Message]:
    return [{"role": "user", "content": row["prompt"]}]


async def two_turns(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    messages = prompt_of(row)
    first = await llm.chat(messages)
    messages += [first.message, {"role": "tool", "content": "again"}]
    second = await llm.chat(messages)
    ctx.state["texts"] = [first.text, second.text]
    return llm.trajectory(metrics={"first": len(first.token_ids)})


async def rewarded_turns(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Give the first answer 0.25, the second one 0.5, and the sample 1 in addition."""
    messages = prompt_of(row)
    for _ in range(2):
        turn = await llm.chat(messages)
        messages += [turn.message, {"role": "tool", "content": "again"}]
    return llm.trajectory(reward=1.0, turn_rewards=[0.25, 0.5])


async def no_prefix(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    first = await llm.chat(prompt_of(row))
    await llm.chat(
        [*prompt_of(row), {"role": "assistant", "content": first.text + "!"}, {"role": "user", "content": "1"}]
    )
    await llm.chat([*prompt_of(row), first.message, {"role": "user", "content": "2"}])
    return llm.trajectory()


async def three_at_once(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    await asyncio.gather(*(llm.chat(prompt_of(row)) for _ in range(3)))
    return llm.trajectory()


async def raw_text(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    turn = await llm.complete(row["prompt"])
    return llm.trajectory(reward=float(turn.text == row["answer"]))


async def from_a_thread(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Run an agent that is not async and has its own event loop."""

    def agent() -> Trajectory:
        turn = asyncio.run(llm.chat(prompt_of(row)))
        ctx.state["text"] = turn.text
        return llm.trajectory()

    return await ctx.call(agent)


async def bad(row: Row, llm: LLM, ctx: Context, *, kinds: list[str]) -> Any:
    """Fail sample 1 of task n in the way that kinds[n] names, while the other samples make their calls."""
    kind = kinds[int(ctx.task_id.rpartition("/")[2])]
    first = await llm.chat(prompt_of(row))
    if ctx.sample == 1:
        return await _bad(kind, row, llm, ctx)
    await llm.chat([*prompt_of(row), first.message, {"role": "tool", "content": "again"}])
    return llm.trajectory()


async def _bad(kind: str, row: Row, llm: LLM, ctx: Context) -> Any:
    if kind == "raise":
        raise ValueError("no such tool")
    if kind == "hang":
        await asyncio.sleep(60)
    if kind == "deaf":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
    if kind == "spin":
        while True:
            pass
    if kind == "task":
        await asyncio.gather(asyncio.create_task(_spin()))
    if kind == "tool":
        await ctx.call(time.sleep, 60, timeout_s=0.3)
    if kind == "death":
        os._exit(7)
    if kind == "fault":
        ctypes.string_at(0)
    if kind == "tool's death":
        await ctx.call(os._exit, 7)
    if kind == "memory":
        ctx.state["held"] = [bytearray(1 << 24) for _ in range(1000)]
    if kind == "nothing":
        return None
    if kind == "exit":
        raise SystemExit(3)
    if kind == "state":
        ctx.state["what"] = object()
    if kind == "turn rewards":
        llm.trajectory(turn_rewards=[1.0, 2.0])
    trajectory = llm.trajectory()
    if kind == "short rewards":
        trajectory.sequences[0].rewards = [1.0]
    if kind == "infinite rewards":
        trajectory.sequences[0].rewards = [1e39] * len(trajectory.sequences[0].token_ids)
    if kind == "late turn":
        trajectory.sequences[0].turns = [(0, 10_000)]
    if kind == "empty":
        trajectory.sequences = []
    if kind == "uneven":
        trajectory.sequences[0].logprobs.pop()
    if kind == "forged":
        trajectory.sequences[0].loss_mask[0] = 1
    if kind == "first":
        first = trajectory.sequences[0]
        first.loss_mask[0], first.logprobs[0], first.versions[0] = 1, -1.0, 0
    if kind in ("future", "ancient", "certain", "impossible"):
        last = trajectory.sequences[0]
        at = len(last.loss_mask) - 1 - last.loss_mask[::-1].index(1)
        last.versions[at] = {"future": 2**31 - 1, "ancient": -(2**31)}.get(kind, last.versions[at])
        last.logprobs[at] = {"certain": 1e30, "impossible": -1e30}.get(kind, last.logprobs[at])
    if kind in ("high id", "low id"):
        trajectory.sequences[0].token_ids[1] = 1_000_000 if kind == "high id" else -1
    if kind == "copies":
        trajectory.sequences *= 200
    if kind == "long":
        await llm.chat([{"role": "user", "content": "1" * 600}])
    if kind == "without end":
        await llm.chat([{"role": "user", "content": "1" * (12 << 20)}])
    if kind == "too much":
        await llm.chat([{"role": "user", "content": "1" * (17 << 20)}])
    if kind == "great state":
        ctx.state["bytes"] = [1] * (17 << 20)
    if kind == "nan":
        trajectory.reward = float("nan")
    if kind == "text":
        trajectory.sequences[0].token_ids[0] = "a"  # type: ignore[call-overload]
    return trajectory


async def _spin() -> None:
    while True:
        pass


async def once_bad(row: Row, llm: LLM, ctx: Context, *, folder: str) -> Trajectory:
    """End the process on each sample's first attempt, and succeed on the next."""
    done = Path(folder) / f"{row['prompt']}-{ctx.sample}"
    await llm.chat(prompt_of(row))
    if not done.exists():
        done.touch()
        os._exit(7)
    return llm.trajectory()


async def late_tool(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    try:
        await ctx.call(time.sleep, 60, timeout_s=0.1)
    except TimeoutError as error:
        ctx.state["why"] = str(error)
    ctx.state["pow"] = await ctx.call(pow, 2, 5)
    ctx.state["remaining_s"] = ctx.remaining_s
    await llm.chat(prompt_of(row))
    return llm.trajectory()


async def until_full(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    calls = 0
    while True:
        try:
            await llm.chat(prompt_of(row))
        except ContextFull as error:
            ctx.state["why"] = str(error)
            return llm.trajectory(metrics={"calls": calls})
        calls += 1


async def asleep(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    await asyncio.sleep(60)
    return llm.trajectory()


async def process_of(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Record which process made the sample and whether it has loaded torch."""
    import sys

    ctx.state["pid"] = os.getpid()
    ctx.state["torch"] = "torch" in sys.modules
    await llm.chat(prompt_of(row))
    return llm.trajectory(reward=1.0)


async def sleeps(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    time.sleep(60)  # noqa: ASYNC251
    return llm.trajectory()


async def spins(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    while True:
        pass


async def keeps_the_lock(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    """Match a pattern that takes exponential time. Python's lock is kept until the match ends."""
    await ctx.call(re.match, "(a+)+$", "a" * 40 + "b")
    return llm.trajectory()


async def works_for_half_a_second(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    began = time.monotonic()
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        pass
    return llm.trajectory(metrics={"wall_s": time.monotonic() - began})
