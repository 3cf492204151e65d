"""Tests training on the data set's answers, which serve as samples: supervised fine-tuning and preferences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proto.messages import TaskHandle
from services.rollout.sampling.answers import dataset_answers
from services.rollout.sampling.prompts import GivenAnswer, PromptBuilder
from services.rollout.sampling.tasks import ReadyTask
from services.rollout.sampling.trajectory import SequenceTokens, at_end
from tests.unit.rollout.rollout_engine import MODEL


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=True)


def task(*answers: list[int]) -> ReadyTask:
    given = [GivenAnswer(ids, [True] * len(ids)) for ids in answers]
    return ReadyTask(TaskHandle("train/0/1", 1), {}, [5, 6], given or None)


def test_an_answer_ends_with_the_end_of_sequence_token(prompts: PromptBuilder) -> None:
    ids = prompts.answer({"prompt": "1+1=", "answer": "42"}).token_ids
    assert prompts.completion(ids, ()) == "42"
    assert prompts.completion(ids[:-1], ()) == "42"
    assert len(ids) == 3


def test_a_row_without_an_answer_is_refused(prompts: PromptBuilder) -> None:
    with pytest.raises(ValueError, match="row has no answer"):
        prompts.answer({"prompt": "1+1="})


def test_answers_of_the_data_set_are_used_as_samples() -> None:
    made = dataset_answers([task([7, 8, 2], [3, 2]), task([9, 2])], swaps=2)
    assert made is not None
    assert [[each.token_ids.tolist() for each in group] for group in made] == [[[7, 8, 2], [3, 2]], [[9, 2]]]
    assert {each.finish_reason for group in made for each in group} == {"stop"}
    assert {int(swaps) for group in made for each in group for swaps in each.swaps} == {2}
    assert not np.concatenate([each.logprobs for group in made for each in group]).any()


def test_tasks_without_answers_are_left_to_the_engine() -> None:
    assert dataset_answers([task(), task()], swaps=2) is None
    assert dataset_answers([], swaps=2) is None


@pytest.mark.parametrize("answer", ["42", [{"role": "assistant", "content": "42"}]])
def test_a_preferred_answer_is_text_or_one_message(prompts: PromptBuilder, answer: object) -> None:
    assert prompts.completion(prompts.answer({"prompt": "1+1=", "chosen": answer}, "chosen").token_ids, ()) == "42"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "1"}, "row has no rejected: a preference needs chosen and rejected"),
        ({"rejected": 3}, "rejected must be text or a list with one message of the assistant, not a number"),
        ({"rejected": [{"role": "user", "content": "a"}]}, "not a list .*put earlier messages into the prompt"),
        (
            {"rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "put earlier messages into the prompt",
        ),
        ({"rejected": [{"role": "assistant", "content": None}]}, "not null"),
    ],
)
def test_an_answer_that_is_no_preference_is_refused(prompts: PromptBuilder, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts.answer({"prompt": "1+1=", **row}, "rejected")


def test_a_value_head_learns_at_one_token_after_the_sequence() -> None:
    mask, logprobs = np.array([0, 1, 1], np.uint8), np.zeros(3, np.float32)
    made = at_end(SequenceTokens(np.array([5, 7, 2], np.int32), mask, logprobs, np.array([-1, 4, 4], np.int32)))
    assert made.token_ids.tolist() == [5, 7, 2, 2]
    assert made.loss_mask.tolist() == [0, 0, 0, 1]
    assert made.versions.tolist() == [-1, -1, -1, 4]
    assert {key: values.dtype for key, values in made.by_key().items()} == {
        "token_ids": np.int32,
        "loss_mask": np.uint8,
        "rollout_logprobs": np.float32,
        "versions": np.int32,
    }
