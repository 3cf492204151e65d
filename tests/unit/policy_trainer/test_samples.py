"""Tests that a worker refuses shards that do not match one another, and log-probs that are not finite, before it
computes anything."""

from __future__ import annotations

import numpy as np
import pytest

from proto.messages import ErrorCode, TaskHandle
from proto.tensors import Array
from services.policy_trainer.worker import samples
from shared.rpc.errors import RpcError

HANDLES = [TaskHandle(f"train/0/{index}", 1, 2, 7, 0, [0]) for index in range(3)]


def tasks() -> list[dict[str, Array]]:
    return [
        {
            "token_ids": np.arange(7, dtype=np.int32),
            "lengths": np.array([3, 4], np.int32),
            "sample_index": np.array([0, 1], np.int32),
            "loss_mask": np.ones(7, np.uint8),
            "rollout_logprobs": np.full(7, -1.0, np.float32),
            "ref_logprobs": np.full(7, -1.5, np.float32),
        }
        for _ in HANDLES
    ]


def columns(given: list[dict[str, Array]]) -> samples.Columns:
    return {key: [task[key] for task in given] for key in given[0]}


def refusal(given: list[dict[str, Array]]) -> RpcError:
    with pytest.raises(RpcError) as caught:
        samples.check(HANDLES, columns(given))
    assert caught.value.code == ErrorCode.BAD_DATA
    return caught.value


def test_matching_shards_are_accepted() -> None:
    samples.check(HANDLES, columns(tasks()))
    samples.check([], {"lengths": []})


@pytest.mark.parametrize(
    ("key", "values", "says"),
    [
        ("ref_logprobs", np.zeros(6, np.float32), r"ref_logprobs has shape \[6\], but its lengths say \[7\]"),
        ("token_ids", np.zeros((7, 1), np.int32), r"token_ids has shape \[7, 1\]"),
        ("sample_index", np.zeros(3, np.int32), r"sample_index has shape \[3\], but its lengths say \[2\]"),
    ],
)
def test_a_shard_of_the_wrong_shape_is_reported_with_its_task(key: str, values: Array, says: str) -> None:
    given = tasks()
    given[1][key] = values
    error = refusal(given)
    assert error.names == ["train/0/1"]
    with pytest.raises(RpcError, match=says):
        samples.check(HANDLES, columns(given))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_log_probs_are_refused_and_all_their_tasks_are_named(value: float) -> None:
    given = tasks()
    given[0]["rollout_logprobs"][4] = value
    given[2]["ref_logprobs"][0] = value
    error = refusal(given)
    assert error.names == ["train/0/0", "train/0/2"]
    assert "rollout_logprobs has values that are not finite: 1, the first at token 4" in str(error)
