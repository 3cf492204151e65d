"""From generations and scores to shards and results."""

from __future__ import annotations

import numpy as np

from proto.messages import Outcome, TaskHandle
from services.rollout.assemble import assemble, task_shards
from services.rollout.engine import Generation
from services.rollout.rewards.scoring import Score
from services.rollout.tasks import ReadyTask
from shared.stages import ROLLOUT

FAILED = Score(None, "my:fn: raised ValueError: no")


def generation(*ids: int, reason: str = "stop") -> Generation:
    return Generation(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), reason)


def task(index: int, *prompt: int) -> ReadyTask:
    return ReadyTask(TaskHandle(f"train/0/{index}", 4), {"prompt": "p"}, list(prompt))


def test_shards_are_ragged_and_mark_what_the_policy_sampled() -> None:
    shards = task_shards([7, 8], [generation(5, 2), generation(6)], version=3)
    assert tuple(shards) == ROLLOUT.makes
    assert shards["token_ids"].tolist() == [7, 8, 5, 2, 7, 8, 6]
    assert shards["lengths"].tolist() == [4, 3]
    assert shards["sample_index"].tolist() == [0, 1]
    assert shards["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert shards["rollout_logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert shards["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 3]
    dtypes = [shards[key].dtype.name for key in ROLLOUT.makes]
    assert dtypes == ["int32", "int32", "int32", "uint8", "float32", "int32"]


def test_failed_samples_are_left_out_and_counted() -> None:
    group = [generation(5, 2), generation(6, 6, 6, reason="length"), generation(9, 2)]
    block = assemble([task(0, 1)], [group], [[Score(1.0), FAILED, Score(0.5)]], version=3, min_survivors=2)
    (result,) = block.results
    assert (result.outcome, result.samples, result.samples_failed, result.tokens) == (Outcome.DONE, 2, 1, 6)
    assert block.shards[0]["token_ids"].tolist() == [1, 5, 2, 1, 9, 2]
    assert block.shards[0]["sample_index"].tolist() == [0, 1]
    assert block.scalars["reward"].tolist() == [1.0, 0.5]
    assert block.scalars["length"].tolist() == [2, 2]


def test_a_task_with_fewer_than_two_survivors_is_dropped_with_the_cause() -> None:
    groups = [[generation(5, 2), generation(6, 2)], [generation(5, 2), generation(6, 6, reason="length")]]
    scores = [[Score(1.0), FAILED], [Score(0.0), Score(1.0)]]
    block = assemble([task(0, 1), task(1, 1)], groups, scores, version=0, min_survivors=2)
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
    assert block.scalars["version_min"].tolist() == block.scalars["version_max"].tolist() == [0, 0]


def test_one_survivor_of_an_evaluation_counts() -> None:
    block = assemble(
        [task(0, 1)], [[generation(5, 2), generation(6, 2)]], [[Score(1.0), FAILED]], version=0, min_survivors=1
    )
    assert block.results[0].samples == 1
    assert not block.dropped
