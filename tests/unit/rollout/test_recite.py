"""Tests supervised fine-tuning, in which the data set's answers serve as samples."""

from __future__ import annotations

import numpy as np
import pytest

from proto.messages import TaskHandle
from services.rollout.sampling.answers import dataset_answers
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import ReadyTask
from tests.unit.rollout.rollout_engine import MODEL


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(MODEL, add_generation_prompt=True)


def task(answer: list[int] | None) -> ReadyTask:
    return ReadyTask(TaskHandle("train/0/1", 1), {}, [5, 6], answer)


def test_an_answer_ends_with_the_end_of_sequence_token(prompts: PromptBuilder) -> None:
    ids = prompts.answer_ids({"prompt": "1+1=", "answer": "42"})
    assert prompts.completion(ids, ()) == "42"
    assert prompts.completion(ids[:-1], ()) == "42"
    assert len(ids) == 3


def test_a_row_without_an_answer_is_refused(prompts: PromptBuilder) -> None:
    with pytest.raises(ValueError, match="row has no answer"):
        prompts.answer_ids({"prompt": "1+1="})


def test_answers_of_the_data_set_are_used_as_samples() -> None:
    made = dataset_answers([task([7, 8, 2]), task([9, 2])], samples=1, swaps=2)
    assert made is not None
    assert [[each.token_ids.tolist() for each in group] for group in made] == [[[7, 8, 2]], [[9, 2]]]
    assert {each.finish_reason for group in made for each in group} == {"stop"}
    assert {int(swaps) for group in made for each in group for swaps in each.swaps} == {2}
    assert not np.concatenate([each.logprobs for group in made for each in group]).any()


def test_tasks_without_answers_are_left_to_the_engine() -> None:
    assert dataset_answers([task(None), task(None)], samples=4, swaps=2) is None
    assert dataset_answers([], samples=1, swaps=2) is None
