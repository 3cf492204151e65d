"""Tests how shards and results are assembled from generations and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from proto.messages import DropReason, LossReason, Outcome, TaskHandle, TaskResult
from services.rollout.engine import FinishReason, Generation
from services.rollout.results.finish import MOST_NAMES, Assembled, NamedValues, assemble, in_files, task_shards
from services.rollout.rewards.score import Score
from services.rollout.sampling.tasks import ReadyTask
from services.rollout.sampling.trajectory import (
    BlockVersions,
    Made,
    SequenceTokens,
    answers_of,
    single_turns,
    with_turn_rewards,
)
from shared.sample import Sample
from tests.keys import SAMPLED

FAILED = Score(None, "my:fn: raised ValueError: no")


SAMPLE = Sample("train/0/0", {}, [], "", [], FinishReason.STOP)


def answer(*ids: int, reason: str = "stop", prompt: tuple[int, ...] = (1,), version: int = 3, **metrics: float) -> Made:
    generation = Generation(
        np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), reason, np.zeros(len(ids), np.int32)
    )
    (sequences,) = single_turns(prompt, answers_of([[generation]], BlockVersions(version, 0))[0])
    return Made(sequences, reason == FinishReason.LENGTH, SAMPLE, metrics=metrics)


def task(index: int, *prompt: int) -> ReadyTask:
    return ReadyTask(TaskHandle(f"train/0/{index}", 4), {"prompt": "p"}, list(prompt))


def test_shards_are_ragged_and_mark_the_sampled_tokens() -> None:
    shards = task_shards([answer(5, 2, prompt=(7, 8)).sequences, answer(6, prompt=(7, 8)).sequences])
    assert tuple(shards) == SAMPLED
    assert shards["token_ids"].tolist() == [7, 8, 5, 2, 7, 8, 6]
    assert shards["lengths"].tolist() == [4, 3]
    assert shards["sample_index"].tolist() == [0, 1]
    assert shards["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert shards["rollout_logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert shards["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 3]
    dtypes = [shards[key].dtype.name for key in SAMPLED]
    assert dtypes == ["int32", "int32", "int32", "uint8", "float32", "int32"]


def test_failed_samples_are_left_out_and_counted() -> None:
    group = [answer(5, 2), answer(6, 6, 6, reason="length"), answer(9, 2)]
    block = assemble([task(0, 1)], [group], [[Score(1.0), FAILED, Score(0.5)]], min_survivors=2)
    (result,) = block.results
    assert (result.outcome, result.samples, result.samples_failed, result.tokens) == (Outcome.DONE, 2, 1, 6)
    assert block.shards[0]["token_ids"].tolist() == [1, 5, 2, 1, 9, 2]
    assert block.shards[0]["sample_index"].tolist() == [0, 1]
    assert block.scalars["reward"].tolist() == [1.0, 0.5]
    assert block.scalars["length"].tolist() == [2, 2]


def test_a_task_with_fewer_than_two_survivors_is_dropped_with_the_cause() -> None:
    groups = [[answer(5, 2), answer(6, 2)], [answer(5, 2), answer(6, 6, reason="length")]]
    scores = [[Score(1.0), FAILED], [Score(0.0), Score(1.0)]]
    block = assemble([task(0, 1), task(1, 1)], groups, scores, min_survivors=2)
    (dropped,) = block.dropped
    assert (dropped.task_id, dropped.fence, dropped.outcome, dropped.samples_failed) == (
        "train/0/0",
        4,
        Outcome.DROP,
        1,
    )
    assert "1 of 2 samples failed" in dropped.reason
    assert "ValueError: no" in dropped.reason
    assert [result.task_id for result in block.results] == ["train/0/1"]
    assert block.scalars["reward"].tolist() == [0.0, 1.0]
    assert block.scalars["truncated"].tolist() == [0, 1]
    assert block.scalars["version_min"].tolist() == block.scalars["version_max"].tolist() == [3, 3]


def test_one_surviving_sample_is_enough_in_an_evaluation() -> None:
    block = assemble([task(0, 1)], [[answer(5, 2), answer(6, 2)]], [[Score(1.0), FAILED]], min_survivors=1)
    assert block.results[0].samples == 1
    assert not block.dropped


def test_a_sample_of_several_sequences_and_versions_counts_once() -> None:
    def part(mask: list[int], versions: list[int]) -> SequenceTokens:
        n = len(mask)
        return SequenceTokens(
            np.arange(n, dtype=np.int32),
            np.array(mask, np.uint8),
            np.zeros(n, np.float32),
            np.array(versions, np.int32),
        )

    two = Made([part([0, 1, 0, 1], [-1, 4, -1, 5]), part([0, 1], [-1, 6])], True, SAMPLE)
    block = assemble([task(0, 1)], [[two, answer(5, 2)]], [[Score(1.0), Score(0.0)]], min_survivors=2)
    (shards,) = block.shards
    assert shards["lengths"].tolist() == [4, 2, 3]
    assert shards["sample_index"].tolist() == [0, 0, 1]
    assert block.results[0].samples == 2
    assert block.scalars["length"].tolist() == block.scalars["loss_tokens"].tolist() == [3, 2]
    assert block.scalars["truncated"].tolist() == [1, 0]
    assert block.scalars["version_min"].tolist() == [4, 3]
    assert block.scalars["version_max"].tolist() == [6, 3]


def test_tasks_that_the_filter_may_drop_are_put_separately() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    results = [TaskResult(f"train/0/{i}", 1, Outcome.DONE, samples=samples) for i, samples in enumerate((2, 2, 1, 3))]
    block = Assembled(results, [{}] * 4, [], {"reward": np.array(rewards, np.float32)})
    assert in_files(block, filters=True) == [[1], [0, 2, 3]]
    assert in_files(block, filters=False) == [[0, 1, 2, 3]]
    assert in_files(block, filters=True, scored_later=True) == [[0], [1], [2], [3]]


def test_lost_samples_and_dropped_tasks_are_recorded_with_their_reasons() -> None:
    groups = [[answer(5, 2)] * 3, [answer(5, 2)] * 3, [answer(5, 2)] * 2]
    late, no_sample = Score(None, "f: late", kind=LossReason.TIMEOUT), Score(None, "w: no", kind=LossReason.WORKFLOW)
    scores = [[Score(1.0), late, Score(0.5)], [late, no_sample, Score(1.0)], [no_sample, no_sample]]
    block = assemble([task(at, 1) for at in range(3)], groups, scores, min_survivors=2)
    assert [each.lost for each in block.results] == [{"timeout": 1}]
    assert [(each.why, each.lost) for each in block.dropped] == [
        (DropReason.REWARD_FAILED, {"timeout": 1, "workflow": 1}),
        (DropReason.WORKFLOW_FAILED, {"workflow": 2}),
    ]


def test_named_values_of_samples_follow_the_order_of_survivors_and_their_number_is_limited() -> None:
    scores = [[Score(1.0, parts={"form": 0.5}), FAILED, Score(0.0, parts={"form": 1.0, "sum": 2.0})]]
    block = assemble([task(0, 1)], [[answer(5, 2, turns=float(at)) for at in range(3)]], scores, min_survivors=2)
    names = NamedValues()
    columns = names.columns(block.named)
    assert list(columns) == ["reward/part/form", "workflow/turns", "reward/part/sum"]
    assert columns["reward/part/form"].tolist() == [0.5, 1.0]
    assert columns["workflow/turns"].tolist() == [0.0, 2.0]
    assert np.isnan(columns["reward/part/sum"]).tolist() == [True, False]
    later = names.columns([{"workflow/turns": 1e300}, *({f"workflow/{at}": 1.0} for at in range(100))])
    assert list(later)[:3] == list(columns)  # Every lease has the same columns.
    assert len(later) == MOST_NAMES
    assert np.isnan(later["workflow/turns"]).all()


def test_a_sample_of_a_source_has_its_reward_under_the_name_of_the_source() -> None:
    made = answer(5, 2)
    of_source = [replace(made, sample=replace(made.sample, source=name)) for name in ("a", "", "b")]
    scores = [[Score(1.0), Score(0.5), Score(0.25)]]
    block = assemble([task(0, 1)], [of_source], scores, min_survivors=2)
    columns = NamedValues().columns(block.named)
    assert list(columns) == ["reward/source/a", "reward/source/b"]
    assert np.nan_to_num(columns["reward/source/a"], nan=-1).tolist() == [1.0, -1, -1]
    assert np.nan_to_num(columns["reward/source/b"], nan=-1).tolist() == [-1, -1, 0.25]


def test_rewards_of_turns_are_added_to_the_sample_and_become_a_key_if_tokens_have_advantages() -> None:
    one = answer(5, 2, prompt=(7, 8))
    assert with_turn_rewards(one, Score(1.0), per_token=False) == (one, Score(1.0))
    made, score = with_turn_rewards(one, Score(1.5, turns=[0.5]), per_token=True)
    assert score.value == 1.5  # the function's value contains its turns
    shards = task_shards([made.sequences])
    assert tuple(shards) == (*SAMPLED, "turn_rewards")
    assert shards["turn_rewards"].tolist() == [0, 0, 0, 0.5]
    made, _ = with_turn_rewards(one, Score(1.0), per_token=True)
    assert task_shards([made.sequences])["turn_rewards"].tolist() == [0, 0, 0, 0]


def test_rewards_for_another_number_of_turns_cost_only_that_sample() -> None:
    made, score = with_turn_rewards(answer(5, 2), Score(1.0, turns=[0.5, 0.5]), per_token=False)
    assert (score.value, score.kind) == (None, LossReason.ANSWER)
    assert score.failure == "2 turn rewards for 1 turns; give one number for each answer of the policy"
    assert made.sequences


def test_a_workflow_and_a_function_may_both_reward_turns() -> None:
    one = replace(answer(5, 2, prompt=(7,)), turn_rewards=[np.array([0, 0.25, 0], np.float32)], turns=[(0, 2)])
    made, score = with_turn_rewards(one, Score(2.0, turns=[1.0]), per_token=True)
    assert score.value == 2.25
    assert made.sequences[0].by_key()["turn_rewards"].tolist() == [0, 0.25, 1.0]
    _, lost = with_turn_rewards(replace(one, turn_rewards=[np.full(3, 2e38, np.float32)]), Score(0.0), per_token=False)
    assert "is 6e+38, which is not finite in float32" in lost.failure
