"""Tests workflows on the real engine: captured tokens, batched calls, and isolation of bad samples."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from proto.messages import ErrorCode
from services.rollout.rewards.score import Score
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.trajectory import Made, with_turn_rewards
from services.rollout.user_code.builtin import compute, value_text
from services.rollout.user_code.frames import Purpose
from services.rollout.user_code.load import load
from shared.lease import LeaseLost
from shared.openai_api.tools import tool_calls
from shared.rpc.errors import RpcError
from tests.unit.rollout.rollout_engine import MODEL, TOOLS_MODEL
from tests.unit.rollout.workflow_rig import VERSION, Rig, logprob_error, rig, shown

pytestmark = pytest.mark.slow

Row = dict[str, Any]


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=True)


class Bench:
    """A test bench with one engine for all tests in this file."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.rig = Rig()
        self._loop.run_until_complete(self.rig.start())

    def run(self, workflow: str, **options: Any) -> list[list[Made]]:
        """Run a workflow and return its samples in the shape [tasks][samples]."""
        self.rig.blocks.clear()
        return self._loop.run_until_complete(self.rig.make(workflow, **options))

    def close(self) -> None:
        self._loop.run_until_complete(self.rig.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def only(made: list[list[Made]]) -> Made:
    ((one,),) = made
    return one


def failures(made: list[list[Made]]) -> list[str]:
    return [each.score.failure for group in made for each in group if each.score is not None]


def test_two_turns_are_one_sequence_of_the_tokens_as_they_were_sampled(bench: Bench, prompts: PromptBuilder) -> None:
    made = bench.run("two_turns")
    for group in made:
        for each in group:
            (sequence,) = each.sequences
            first, second = each.sample.state["texts"]
            mask = sequence.loss_mask == 1
            sampled = re.sub("<(eos|unk|pad|bos)>", "", shown(prompts, sequence))
            # Only the template's own text lies between the answers; an answer's EOS is the policy's.
            assert sampled == f"user: {each.sample.row['prompt']}\nassistant: {first}\ntool: again\nassistant: {second}"
            assert mask.sum() == len(each.sample.token_ids)
            assert set(sequence.versions[mask]) == {VERSION}
            assert set(sequence.versions[~mask]) == {-1}
            assert (sequence.logprobs[~mask] == 0).all()
            assert logprob_error(sequence) < 1e-4
            assert (each.sample.turns, each.sample.completion) == (2, second)
            assert [message["role"] for message in each.sample.messages] == ["user", "assistant", "tool", "assistant"]


def test_rewards_of_turns_are_at_the_last_token_of_their_turn(bench: Bench) -> None:
    for one in (one for group in bench.run("rewarded_turns", tasks=2, samples=2) for one in group):
        (sequence,), (rewards,) = one.sequences, one.turn_rewards
        sampled = sequence.loss_mask.astype(int)
        ends = np.flatnonzero(np.diff(sampled, append=0) == -1)
        assert one.turns == [(0, end) for end in ends]
        assert rewards[ends].tolist() == [0.25, 0.5]
        assert rewards.sum() == 0.75
        made, score = with_turn_rewards(one, one.score or Score(0.0), per_token=True)
        assert score.value == 1.75
        assert made.sequences[0].by_key()["turn_rewards"].tolist() == rewards.tolist()


def test_samples_of_a_group_differ_and_the_same_seed_reproduces_them(bench: Bench) -> None:
    once = bench.run("two_turns", tasks=1, samples=6)
    again = bench.run("two_turns", tasks=1, samples=6)
    texts = [each.sample.state["texts"] for each in once[0]]
    assert len({tuple(each) for each in texts}) > 1
    # Block shapes can vary between runs and change the last bits, but not the draws.
    same = sum(left == right for left, right in zip(texts, (e.sample.state["texts"] for e in again[0]), strict=True))
    assert same >= 5


def test_calls_of_many_samples_share_blocks(bench: Bench) -> None:
    made = bench.run("two_turns", tasks=4, samples=8)
    blocks = bench.rig.blocks
    assert sum(blocks) == 64
    assert len(blocks) <= 16
    assert max(blocks) >= 16
    assert len(made) == 4


def test_a_history_that_is_not_a_prefix_opens_a_new_sequence(bench: Bench) -> None:
    made = only(bench.run("no_prefix", tasks=1, samples=1))
    one, other = made.sequences
    assert logprob_error(one) < 1e-4
    assert logprob_error(other) < 1e-4
    # The first and the third call share a sequence, which has two stretches of sampled tokens; the second call's
    # sequence has one.
    stretches = [int((np.diff(each.loss_mask.astype(int)) == 1).sum()) for each in (one, other)]
    assert stretches == [2, 1]


def test_concurrent_calls_each_get_their_own_sequence(bench: Bench) -> None:
    assert len(only(bench.run("three_at_once", tasks=1, samples=1)).sequences) == 3


def test_raw_text_is_completed_unchanged(bench: Bench, prompts: PromptBuilder) -> None:
    made = only(bench.run("raw_text", tasks=1, samples=1))
    (sequence,) = made.sequences
    assert shown(prompts, sequence).startswith(made.sample.row["prompt"])
    assert logprob_error(sequence) < 1e-4
    assert made.score is not None
    assert made.score.value in (0.0, 1.0)


def test_the_calculator_returns_the_value_of_each_called_expression() -> None:
    async def run() -> tuple[list[Made], list[str]]:
        async with rig(TOOLS_MODEL) as made:
            groups = await made.make("builtin:calculator", tasks=4, samples=8, max_new_tokens=24)
            flat = [each for group in groups for each in group]
            return flat, [shown(made.prompts, sequence) for each in flat for sequence in each.sequences]

    flat, texts = asyncio.run(run())
    assert len(texts) == len(flat) == 32
    calls = [each.metrics["calculator_calls"] for each in flat]
    assert 0 < sum(calls) < len(flat)  # The model also answers from memory.
    for each, text, used in zip(flat, texts, calls, strict=True):
        assert each.sample.turns == 1 + bool(used)
        results = "".join(
            f"<|im_start|>tool\n{value_text(call.arguments['expression'])}<|im_end|>\n"
            for call in tool_calls(text)[: int(used)]
        )
        assert text.count("<|im_start|>tool\n") == used
        assert f"<|im_end|>\n{results}<|im_start|>assistant\n" in text


@pytest.mark.parametrize(("expression", "value"), [("47+85", 132), ("2*(3-5)/4", -1.0), ("-3", -3), ("1.5+1", 2.5)])
def test_the_calculator_evaluates_expressions(expression: str, value: float) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2**9", "a+1", "'a'*3", "9" * 101, "True+1"])
def test_the_calculator_refuses_anything_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is for the policy
        compute(expression)


NONSENSE = {
    "raise": "raised ValueError: no such tool",
    "exit": "raised SystemExit: 3",
    "tool": "gave no answer within 0.3 s",
    "long": "leaves no room in the model's context of 512",
    "without end": "but there is room for 512",
    "too much": "bytes exceeds the limit of 16777216",
    "great state": "bytes exceeds the limit of 16777216",
    "nothing": "returned NoneType, but must return a Trajectory",
    "empty": "returned a trajectory without a sampled token",
    "uneven": "must be equally long",
    "forged": "versions from -1 to 7, but the policy's are 0 to 7",
    "future": "versions from 7 to 2147483647, but the policy's are 0 to 7",
    "ancient": "versions from -2147483648 to 7, but the policy's are 0 to 7",
    "certain": "to 1e+30, but must be at most 0 and at least -1000",
    "impossible": "log-probs from -1e+30 to",
    "first": "a sequence's first token has loss_mask 1",
    "high id": "token ids outside the vocabulary of",
    "low id": "token ids outside the vocabulary of",
    "text": "must contain numbers",
    "state": "cannot be handed over",
    "nan": "which is not finite",
    "copies": "workflow.max_tokens allows 2048",
    "turn rewards": "2 turn rewards for 1 turns; give one number for each answer",
    "short rewards": "finite rewards or none, not 1",
    "infinite rewards": "finite rewards or none",
    "late turn": "a turn ends at token 10000 of a sequence of",
}
BLOCKED = ("blocked the loop of its process for 3 s, computing in", "its thread had no processor")
"""What is said about a loop that computes; the latter only on a very busy machine."""
HANGS = {
    "hang": "no trajectory within 3 s (workflow.timeout_s)",
    "deaf": "no trajectory within 3 s (workflow.timeout_s)",
    "spin": BLOCKED,
    "task": BLOCKED,
}
DEATHS = {
    "death": "took its process down: it ended with status 7",
    "fault": "took its process down: it died of SIGSEGV",
    "tool's death": "took its process down: it ended with status 7",
    "memory": "reached the memory limit of its process (workflow.memory)",
}


def check_lost_alone(made: list[list[Made]], says: Mapping[str, str | tuple[str, ...]]) -> None:
    """Assert that only sample 1 of every task is lost, for the expected reason, and that its calls are known."""
    for group, (kind, why) in zip(made, says.items(), strict=True):
        good = [each for each in group if each.score is None]
        lost = [each.score.failure for each in group if each.score is not None]
        assert len(lost) == 1, (kind, lost)
        assert lost[0].startswith("my:workflow sample 1: "), (kind, lost)
        assert any(text in lost[0] for text in ((why,) if isinstance(why, str) else why)), kind
        said = group[1].sample
        assert said.messages[-1] == {"role": "assistant", "content": said.completion}, kind
        assert said.turns == 1
        assert said.token_ids
        assert all(logprob_error(sequence) < 1e-4 for each in good for sequence in each.sequences)


def test_only_the_invalid_sample_is_lost(bench: Bench) -> None:
    made = bench.run("bad", params={"kinds": list(NONSENSE)}, tasks=len(NONSENSE), samples=3)
    check_lost_alone(made, NONSENSE)
    assert bench.rig.lost_processes == 0


def test_only_the_sample_that_hangs_is_lost(bench: Bench) -> None:
    before = bench.rig.lease.progress
    made = bench.run("bad", params={"kinds": list(HANGS)}, tasks=len(HANGS), samples=3, timeout_s=3.0)
    check_lost_alone(made, HANGS)
    assert bench.rig.lost_processes == 2
    assert bench.rig.lease.progress > before


def test_only_the_sample_that_kills_its_process_is_lost(bench: Bench) -> None:
    options = {"tasks": len(DEATHS), "samples": 3, "memory_bytes": 256 << 20, "processes": 2}
    made = bench.run("bad", params={"kinds": list(DEATHS)}, **options)
    check_lost_alone(made, DEATHS)
    # Each bad sample killed a process in which it ran alone, after at least one shared process had died.
    assert bench.rig.lost_processes >= len(DEATHS) + 1


def test_samples_that_shared_a_process_with_a_bad_one_are_repeated_until_they_succeed(
    bench: Bench, tmp_path: Path
) -> None:
    made = bench.run("once_bad", params={"folder": str(tmp_path)}, tasks=1, samples=3)
    assert not failures(made)
    assert len(list(tmp_path.iterdir())) == 3
    assert bench.rig.lost_processes >= 1
    # A broken attempt is not trained on, so there is one call and one sequence.
    assert all(len(each.sequences) == 1 for each in made[0])


def test_workflows_are_spread_across_processes_without_torch_that_end_with_the_pool(bench: Bench) -> None:
    made = bench.run("process_of", tasks=2, samples=4, processes=2)
    states = [each.sample.state for group in made for each in group]
    pids = {state["pid"] for state in states}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(state["torch"] for state in states)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_agent_on_a_thread_with_its_own_loop_may_call_the_policy(bench: Bench) -> None:
    made = bench.run("from_a_thread", tasks=1, samples=3)
    assert not failures(made)
    assert [each.sample.state["text"] for each in made[0]] == [each.sample.completion for each in made[0]]


def test_a_workflow_may_catch_a_tools_timeout(bench: Bench) -> None:
    made = bench.run("late_tool")
    assert not failures(made)
    for each in (each.sample.state for group in made for each in group):
        assert "gave no answer within 0.1 s" in each["why"]
        assert each["pow"] == 32
        assert 0 < each["remaining_s"] < 20


def test_a_sample_has_at_most_max_tokens(bench: Bench) -> None:
    made = only(bench.run("until_full", tasks=1, samples=1, max_tokens=100))
    assert "workflow.max_tokens (100)" in made.sample.state["why"]
    assert made.metrics["calls"] >= 2
    assert sum(len(each.token_ids) for each in made.sequences) <= 100


def test_a_lost_lease_ends_the_block_while_it_waits_for_tools() -> None:
    async def scenario() -> None:
        async with rig() as made:
            asyncio.get_running_loop().call_later(1.5, made.lease.cancel.set)
            with pytest.raises(LeaseLost):
                await made.make("asleep", timeout_s=30)

    started = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("function", "params", "says"),
    [
        ("builtin:calculater", {}, "use builtin:calculator"),
        ("no_such_module:fn", {}, "cannot be imported"),
        ("builtin:calculator", {"turns": 3}, "cannot be called as fn(row, llm, ctx, **params) with params ['turns']"),
        ("os.path:join", {}, "is not a coroutine function; write it with async def"),
    ],
)
def test_a_workflow_that_cannot_be_loaded_causes_a_one_line_error(
    function: str, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RpcError) as caught:
        load(Purpose.WORKFLOW, function, params)
    assert caught.value.code == ErrorCode.BAD_REQUEST
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_continuation_begins_after_the_sampled_end_of_turn_token(prompts: PromptBuilder) -> None:
    builder = PromptBuilder(MODEL, add_generation_prompt=True)
    tokenizer = builder._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = QWEN
    builder._special_ids |= set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    history = [{"role": "user", "content": "1+1="}]
    held = [*builder.token_ids({"prompt": history}), *tokenizer("<think>hm</think>2")["input_ids"], end]
    new = [{"role": "user", "content": "and 2?"}]
    # The template would drop the reasoning of an earlier answer, but the sampled tokens are kept.
    whole = held + builder.continuation(new, None, held)
    assert tokenizer.decode(whole) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>hm</think>2<|im_end|>\n"
        "<|im_start|>user\nand 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    cut = held[:-1]  # A truncated answer gets the end-of-turn token, which was not sampled.
    assert cut + builder.continuation(new, None, cut) == whole


def test_tool_calls_are_found_in_an_answer() -> None:
    call_text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    text = f"hm {call_text} <tool_call>{{x}}</tool_call>"
    ((call,)) = tool_calls(text)
    assert (call.name, call.arguments) == ("calculator", {"expression": "1+1"})
