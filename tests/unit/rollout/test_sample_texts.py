"""Tests the text of samples that a rollout puts into the store for the recorder: conversations, tool calls, and each
turn's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proto.messages import TaskHandle
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.score import Score
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import Made, SequenceTokens
from shared.sample import Sample
from shared.samples.text import Choice, SampleText, TaskText, unpack
from tests.unit.rollout.rollout_engine import MODEL, sampling
from tests.unit.rollout.versions_rig import lease

FUNCTIONS = ["my_rewards:exact"]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "add", </tool_call>'


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=False)


def task(task_id: str, **row: Any) -> ReadyTask:
    return ReadyTask(TaskHandle(task_id=task_id, fence=1, nbytes=0), row, [])


def made(prompts: PromptBuilder, *parts: tuple[str, bool], **fields: Any) -> Made:
    """Return a sample with one sequence made of `parts`. Each part is a text paired with whether the policy sampled
    it."""
    ids = [(prompts._tokenizer(text, add_special_tokens=False).input_ids, sampled) for text, sampled in parts]
    tokens = np.array([each for text, _ in ids for each in text], np.int32)
    mask = np.array([sampled for text, sampled in ids for _ in text], np.uint8)
    sequence = SequenceTokens(tokens, mask, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
    sample = Sample(
        "train/0/1", {}, **{"messages": [], "completion": "", "token_ids": [], "finish_reason": "stop", **fields}
    )
    return Made([sequence], False, sample)


def recorded(
    choice: Choice, prompts: PromptBuilder, tasks: PreparedTasks, made: list[list[Made]], scores: list[list[Score]]
) -> dict[str, Any]:
    """Return the shards of the recorded tasks."""

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    task_ids = [*(task.handle.task_id for task in tasks.ready), *tasks.not_sampled]
    writer = SampleTexts(choice, prompts, FUNCTIONS, at_once)
    return asyncio.run(writer.recorded(lease([]), tasks, made, scores, task_ids))


def texts(prompts: PromptBuilder, given: ReadyTask, group: list[Made], scores: list[Score]) -> TaskText:
    shards = recorded(Choice(1, 1, 1), prompts, PreparedTasks([given], [], sampling(), 1), [group], [scores])
    return unpack(shards[given.handle.task_id])


def test_text_of_a_workflow_has_its_conversation_turns_calls_and_the_tokens_between_them(
    prompts: PromptBuilder,
) -> None:
    messages = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": f"{CALL}{CALL}{BROKEN}"},
        {"role": "tool", "content": f"3 {CALL}"},
        {"role": "assistant", "content": "3"},
    ]
    group = [made(prompts, ("1+2=", False), ("4", True), ("5", False), ("3", True), messages=messages, turns=2)]
    score = Score(0.5, parts={"form": 1.0}, info={"found": "3"})
    found = texts(prompts, task("train/0/1", prompt="1+2="), group, [score])
    (sample,) = found.samples
    assert (sample.turns, sample.tool_calls, sample.messages) == (2, 2, messages)
    assert sample.pieces == ["4", "5", "3"]
    assert (sample.reward, sample.rewards, sample.info) == (0.5, {"form": 1.0}, {"found": "3"})


def test_a_single_answer_needs_no_conversation(prompts: PromptBuilder) -> None:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": f"3{CALL}"}]
    one = made(prompts, ("1+2=", False), ("3", True), messages=messages, completion=f"3{CALL}", finish_reason="length")
    found = texts(prompts, task("train/0/1", prompt="1+2=", answer=3), [one], [Score(1.0)])
    assert (found.prompt, found.answer) == ("1+2=", 3)
    assert found.samples == [SampleText(f"3{CALL}", "length", 1.0, {"exact": 1.0}, tool_calls=1, pieces=["3"])]


def test_a_reward_that_the_workflow_gave_does_not_get_the_name_of_the_function(prompts: PromptBuilder) -> None:
    own = Score(0.5)
    one = replace(made(prompts, ("3", True)), score=own)
    assert texts(prompts, task("train/0/1"), [one], [own]).samples[0].rewards == {}


def test_a_failed_sample_keeps_its_text_and_the_reason_apart_from_the_others(prompts: PromptBuilder) -> None:
    group = [made(prompts, ("3", True), completion=name, token_ids=[1, 2]) for name in ("lost", "kept")]
    found = texts(prompts, task("held/0/1"), group, [Score(None, failure="late"), Score(0.0)])
    assert [(each.completion, each.reward) for each in found.samples] == [("kept", 0.0)]
    assert found.failed == [SampleText("lost", "stop", None, failure="late", length=2)]


def test_only_chosen_tasks_have_text_and_those_that_were_not_sampled_have_their_prompt(prompts: PromptBuilder) -> None:
    group, scores = [made(prompts, ("3", True))], [Score(0.0)]
    tasks = [task(f"train/0/{number}") for number in range(50)]
    rows: dict[str, Any] = {"held/0/2": {"prompt": "long", "answer": 3}, "train/0/99": {}, "held/0/3": {"prompt": [7]}}
    prepared = PreparedTasks([*tasks, task("held/0/1")], [], sampling(), 1, rows)
    shards = recorded(Choice(1, 1, 1 << 62), prompts, prepared, [group] * 51, [scores] * 51)
    assert list(shards) == ["held/0/1", "held/0/2", "held/0/3"]
    assert unpack(shards["held/0/2"]) == TaskText("long", [], 3)
    assert unpack(shards["held/0/3"]) == TaskText("[7]", [])
