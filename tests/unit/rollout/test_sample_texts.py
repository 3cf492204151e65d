"""Tests the text of samples that a rollout puts into the store for the recorder: conversations, tool calls, and each
turn's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proto.messages import TaskHandle
from services.rollout.prompts import PromptBuilder
from services.rollout.rewards.score import Score
from services.rollout.sample_texts import SampleTexts
from services.rollout.tasks import ReadyTask
from services.rollout.trajectory import Rolled, SequenceTokens
from services.rollout.workflows.runner import Made
from shared.sample import Sample
from shared.samples.choice import Choice
from shared.samples.text import SampleText, TaskText, unpack
from tests.unit.rollout.rollout_engine import MODEL

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
    return Made(Rolled([sequence], False), sample, None)


def texts(prompts: PromptBuilder, given: ReadyTask, group: list[Made], scores: list[Score]) -> TaskText:
    shards = SampleTexts(Choice(1, 1, 1), prompts).shards([given], [group], [scores])
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
    found = texts(prompts, task("train/0/1", prompt="1+2="), group, [Score(0.5, parts={"exact": 1.0})])
    (sample,) = found.samples
    assert (sample.turns, sample.tool_calls, sample.messages) == (2, 2, messages)
    assert sample.pieces == ["4", "5", "3"]
    assert (sample.reward, sample.rewards) == (0.5, {"exact": 1.0})


def test_a_single_answer_needs_no_conversation(prompts: PromptBuilder) -> None:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": f"3{CALL}"}]
    one = made(prompts, ("1+2=", False), ("3", True), messages=messages, completion=f"3{CALL}", finish_reason="length")
    found = texts(prompts, task("train/0/1", prompt="1+2=", answer=3), [one], [Score(1.0)])
    assert (found.prompt, found.answer) == ("1+2=", 3)
    assert found.samples == [SampleText(f"3{CALL}", "length", 1.0, tool_calls=1, pieces=["3"])]


def test_samples_without_a_score_are_left_out_and_only_chosen_tasks_have_text(prompts: PromptBuilder) -> None:
    group = [made(prompts, ("3", True), completion=name) for name in ("kept", "failed")]
    scores = [Score(0.0), Score(None, failure="timed out")]
    found = texts(prompts, task("held/0/1"), group, scores)
    assert [each.completion for each in found.samples] == ["kept"]
    chosen = SampleTexts(Choice(1, 1, 1 << 62), prompts)
    tasks = [task(f"train/0/{number}") for number in range(50)]
    shards = chosen.shards([*tasks, task("held/0/1")], [group] * 51, [scores] * 51)
    assert list(shards) == ["held/0/1"]
