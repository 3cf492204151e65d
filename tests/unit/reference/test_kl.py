"""The per-sample KL in the reward equals the KL that a plain loop computes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proto.tensors import Array
from shared.credit import kl_sums


def shards() -> tuple[dict[str, Array], Array]:
    """Return shards of two samples; the first and the third of the three sequences belong to the second sample."""
    rng = np.random.default_rng(0)
    lengths = np.array([4, 3, 5], np.int32)
    made: dict[str, Array] = {
        "lengths": lengths,
        "sample_index": np.array([1, 0, 1], np.int32),
        "loss_mask": np.array([0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1], np.uint8),
        "rollout_logprobs": rng.normal(-1, 0.4, 12).astype(np.float32),
    }
    return made, rng.normal(-1, 0.4, 12).astype(np.float32)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_a_sample_is_the_sum_over_its_sampled_tokens(estimator: str) -> None:
    task, ref = shards()
    expected = [0.0, 0.0]
    owner = [1] * 4 + [0] * 3 + [1] * 5
    for t in range(12):
        if task["loss_mask"][t]:
            d = float(task["rollout_logprobs"][t]) - float(ref[t])
            expected[owner[t]] += {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    found = kl_sums(estimator, task, ref, 2)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_equal_models_have_a_kl_of_zero() -> None:
    task, _ = shards()
    for estimator in ("k1", "k2", "k3"):
        assert not kl_sums(estimator, task, task["rollout_logprobs"], 2).any()


def test_a_sample_without_sampled_tokens_has_a_kl_of_zero() -> None:
    task, ref = shards()
    assert kl_sums("k3", {**task, "loss_mask": np.zeros(12, np.uint8)}, ref, 3).tolist() == [0, 0, 0]
