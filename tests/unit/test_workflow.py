"""Workflows over the real engine: what is captured, how calls are batched, and that a bad sample is lost alone."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import numpy as np
import pytest

from proto.messages import ErrorCode
from services.rollout.prompts import PromptBuilder, tool_calls
from services.rollout.workflows.builtin import calculator, compute
from services.rollout.workflows.load import load_workflow
from services.rollout.workflows.runner import Made
from shared.lease import LeaseLost
from shared.rpc.errors import RpcError
from shared.workflow import LLM, Context, ContextFull, Trajectory, Turn
from tests.unit.rollout_engine import MODEL
from tests.unit.workflow_rig import VERSION, logprob_error, prompt_of, rig, run, shown

Row = dict[str, Any]


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=True)


def only(made: list[list[Made]]) -> Made:
    ((one,),) = made
    return one


def failures(made: list[list[Made]]) -> list[str]:
    return [each.score.failure for group in made for each in group if each.score is not None]


async def two_turns(row: Row, llm: LLM, ctx: Context) -> Trajectory:
    messages = prompt_of(row)
    first = await llm.chat(messages)
    messages += [first.message, {"role": "tool", "content": "again"}]
    second = await llm.chat(messages)
    ctx.state["texts"] = [first.text, second.text]
    return llm.trajectory(metrics={"first": len(first.token_ids)})


def test_two_turns_are_one_sequence_of_the_tokens_as_they_were_sampled(prompts: PromptBuilder) -> None:
    made, _, _ = run(two_turns)
    for group in made:
        for each in group:
            (sequence,) = each.rolled.sequences
            first, second = each.sample.state["texts"]
            mask = sequence.loss_mask == 1
            sampled = re.sub("<(eos|unk|pad|bos)>", "", shown(prompts, sequence))
            # Only the template's own text lies between the answers; an answer's EOS is the policy's.
            assert sampled == f"user: {each.sample.row['prompt']}\nassistant: {first}\ntool: again\nassistant: {second}"
            assert mask.sum() == len(each.sample.token_ids) == each.rolled.sampled
            assert set(sequence.versions[mask]) == {VERSION}
            assert set(sequence.versions[~mask]) == {-1}
            assert (sequence.logprobs[~mask] == 0).all()
            assert logprob_error(sequence) < 1e-4
            assert (each.sample.turns, each.sample.completion) == (2, second)
            assert [message["role"] for message in each.sample.messages] == ["user", "assistant", "tool", "assistant"]


def test_samples_of_a_group_differ_and_the_same_seed_gives_them_again() -> None:
    once, _, _ = run(two_turns, tasks=1, samples=6)
    again, _, _ = run(two_turns, tasks=1, samples=6)
    texts = [each.sample.state["texts"] for each in once[0]]
    assert len({tuple(each) for each in texts}) > 1
    # Blocks may differ in shape from run to run, so the last bits may; the draws may not.
    same = sum(left == right for left, right in zip(texts, (e.sample.state["texts"] for e in again[0]), strict=True))
    assert same >= 5


def test_calls_of_many_samples_share_blocks() -> None:
    made, blocks, _ = run(two_turns, tasks=4, samples=8)
    assert sum(blocks) == 64
    assert len(blocks) <= 16
    assert max(blocks) >= 16
    assert len(made) == 4


def test_a_history_that_is_no_prefix_opens_a_new_sequence() -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        first = await llm.chat(prompt_of(row))
        await llm.chat(
            [*prompt_of(row), {"role": "assistant", "content": first.text + "!"}, {"role": "user", "content": "1"}]
        )
        await llm.chat([*prompt_of(row), first.message, {"role": "user", "content": "2"}])
        return llm.trajectory()

    made = only(run(workflow, tasks=1, samples=1)[0])
    one, other = made.rolled.sequences
    assert logprob_error(one) < 1e-4
    assert logprob_error(other) < 1e-4
    # The first and the third call share a sequence: two stretches of sampled tokens, against one.
    stretches = [int((np.diff(each.loss_mask.astype(int)) == 1).sum()) for each in (one, other)]
    assert stretches == [2, 1]


def test_calls_at_once_each_get_a_sequence() -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        await asyncio.gather(*(llm.chat(prompt_of(row)) for _ in range(3)))
        return llm.trajectory()

    assert len(only(run(workflow, tasks=1, samples=1)[0]).rolled.sequences) == 3


def test_raw_text_is_completed_as_it_is(prompts: PromptBuilder) -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        turn = await llm.complete(row["prompt"])
        return llm.trajectory(reward=float(turn.text == row["answer"]))

    made = only(run(workflow, tasks=1, samples=1)[0])
    (sequence,) = made.rolled.sequences
    assert shown(prompts, sequence).startswith(made.sample.row["prompt"])
    assert logprob_error(sequence) < 1e-4
    assert made.score is not None
    assert made.score.value in (0.0, 1.0)


def test_the_calculator_corrects_wrong_answers(prompts: PromptBuilder) -> None:
    made, _, _ = run(calculator, tasks=3, samples=8)
    flat = [each for group in made for each in group]
    assert not failures(made)
    calls = [each.metrics["calculator_calls"] for each in flat]
    assert sum(calls) > 0
    for each, used in zip(flat, calls, strict=True):
        (sequence,) = each.rolled.sequences
        row = each.sample.row
        assert each.sample.turns == 1 + used
        assert (f"tool: {row['prompt']}{row['answer']}\n" in shown(prompts, sequence)) == bool(used)


@pytest.mark.parametrize(("expression", "value"), [("47+85", 132), ("2*(3-5)/4", -1.0), ("-3", -3), ("1.5+1", 2.5)])
def test_the_calculator_computes(expression: str, value: float) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2**9", "a+1", "'a'*3", "9" * 101, "True+1"])
def test_the_calculator_runs_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # what it says is for the policy
        compute(expression)


def bad(kind: str) -> Any:
    """A workflow whose sample 1 is bad."""

    async def workflow(row: Row, llm: LLM, ctx: Context) -> Any:
        if ctx.sample == 1:
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
            if kind == "block":
                time.sleep(30)  # noqa: ASYNC251  # the thread that everyone needs
            if kind == "tool":
                await ctx.call(time.sleep, 60, timeout_s=0.3)
            if kind == "nothing":
                return None
            if kind == "empty":
                return llm.trajectory()
            if kind == "exit":
                raise SystemExit(3)
        turn: Turn = await llm.chat(prompt_of(row))
        trajectory = llm.trajectory()
        if ctx.sample == 1:
            if kind == "uneven":
                trajectory.sequences[0].logprobs.pop()
            if kind == "forged":
                trajectory.sequences[0].loss_mask[0] = 1
            if kind == "copies":
                trajectory.sequences *= 200
            if kind == "long":
                await llm.chat([{"role": "user", "content": "1" * 600}])
            if kind == "nan":
                trajectory.reward = float("nan")
        del turn
        return trajectory

    return workflow


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raise", "raised ValueError: no such tool"),
        ("hang", "no trajectory within 2 s (workflow.timeout_s)"),
        ("deaf", "no trajectory within 2 s (workflow.timeout_s)"),
        ("block", "kept the thread of all workflows for 2 s"),
        ("tool", "gave no answer within 0.3 s"),
        ("nothing", "returned NoneType, must return a Trajectory"),
        ("empty", "returned a trajectory without a sampled token"),
        ("exit", "SystemExit(3)"),
        ("uneven", "must be equally long"),
        ("forged", "trains on tokens that no policy version sampled"),
        ("long", "leaves no room in the model's context of 512"),
        ("nan", "must be finite"),
        ("copies", "workflow.max_tokens allows 2048"),
    ],
)
def test_a_bad_sample_is_lost_alone(kind: str, says: str) -> None:
    started = time.monotonic()
    made, _, progress = run(bad(kind), tasks=2, samples=3, timeout_s=2.0)
    assert time.monotonic() - started < 15
    assert progress > 0
    assert [len(group) for group in made] == [3, 3]
    for group in made:
        good = [each for each in group if each.score is None]
        lost = [each for each in group if each.score is not None]
        assert len(good) == 2
        assert len(lost) == 1
        assert lost[0].score is not None
        assert says in lost[0].score.failure
        assert all(logprob_error(sequence) < 1e-4 for each in good for sequence in each.rolled.sequences)


def test_a_tool_that_answers_late_may_be_caught_by_the_workflow() -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        with pytest.raises(TimeoutError, match=r"gave no answer within 0\.1 s"):
            await ctx.call(time.sleep, 60, timeout_s=0.1)
        assert await ctx.call(pow, 2, 5) == 32
        assert 0 < ctx.remaining_s < 20
        await llm.chat(prompt_of(row))
        return llm.trajectory()

    assert not failures(run(workflow)[0])


def test_a_sample_has_at_most_max_tokens() -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        calls = 0
        while True:
            try:
                await llm.chat(prompt_of(row))
            except ContextFull as error:
                ctx.state["why"] = str(error)
                return llm.trajectory(metrics={"calls": calls})
            calls += 1

    made = only(run(workflow, tasks=1, samples=1, max_tokens=100)[0])
    assert "workflow.max_tokens (100)" in made.sample.state["why"]
    assert made.metrics["calls"] >= 2
    assert sum(len(each.token_ids) for each in made.rolled.sequences) <= 100


def test_a_lost_lease_ends_the_block_while_tools_are_waited_for() -> None:
    async def workflow(row: Row, llm: LLM, ctx: Context) -> Trajectory:
        await asyncio.sleep(60)
        return llm.trajectory()

    async def scenario() -> None:
        async with rig() as made:
            asyncio.get_running_loop().call_later(0.3, made.lease.cancel.set)
            with pytest.raises(LeaseLost):
                await made.make(workflow, timeout_s=30)

    started = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("function", "params", "says"),
    [
        ("builtin:calculater", {}, "use builtin:calculator"),
        ("no_such_module:fn", {}, "cannot be imported"),
        ("builtin:calculator", {"turns": 3}, "cannot be called as fn(row, llm, ctx, **params) with params ['turns']"),
        ("os.path:join", {}, "is no coroutine function; write it with async def"),
    ],
)
def test_a_workflow_that_cannot_be_had_is_an_error_of_one_line(
    function: str, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RpcError) as caught:
        load_workflow(function, params)
    assert caught.value.code == ErrorCode.BAD_REQUEST
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_follows_an_answer_begins_after_the_end_of_turn_that_was_sampled(prompts: PromptBuilder) -> None:
    builder = PromptBuilder(MODEL, add_generation_prompt=True)
    tokenizer = builder._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = QWEN
    builder._special_ids |= set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    history = [{"role": "user", "content": "1+1="}]
    held = [*builder.token_ids({"prompt": history}), *tokenizer("<think>hm</think>2")["input_ids"], end]
    new = [{"role": "user", "content": "and 2?"}]
    # The template would drop the reasoning of an earlier answer: the sampled tokens stay.
    whole = held + builder.continuation(new, None, held)
    assert tokenizer.decode(whole) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>hm</think>2<|im_end|>\n"
        "<|im_start|>user\nand 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    cut = held[:-1]  # an answer that was cut for its length gets the end of turn, which nobody sampled
    assert cut + builder.continuation(new, None, cut) == whole


def test_tool_calls_are_found_in_an_answer() -> None:
    call_text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    text = f"hm {call_text} <tool_call>{{x}}</tool_call>"
    ((call,)) = tool_calls(text)
    assert (call.name, call.arguments) == ("calculator", {"expression": "1+1"})
