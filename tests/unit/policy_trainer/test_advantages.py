"""Compares the advantage estimators and reward shaping with their formulas, and tests the driver's errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.tensors import Array
from services.policy_trainer import advantages
from services.policy_trainer.advantages import Estimator
from shared.rpc.errors import BadInput
from shared.topology import load
from shared.topology.algorithm import ADVANTAGES, GROUP_ADVANTAGES, INVARIANT_ADVANTAGES, Advantage
from tests.unit.shared.topology.small_topology import make, write

REWARDS = np.array([1.0, 0.0, 0.25, 5.0, 7.0])
GROUPS = np.array([0, 0, 0, 1, 1])
TOKENS = np.array([3, 1, 4, 2, 6])


def estimated(name: str, rewards: Array = REWARDS, groups: Array = GROUPS, **options: Any) -> Array:
    filled = {"scale": "std", "std_epsilon": 1e-6} if name == "grpo" else {}
    return Estimator(Advantage(name=name, **{**filled, **options}))(rewards, groups, TOKENS[: len(rewards)])


def test_grpo_divides_by_the_groups_own_deviation() -> None:
    found = estimated("grpo")
    expected = np.concatenate([(each - each.mean()) / (each.std(ddof=1) + 1e-6) for each in (REWARDS[:3], REWARDS[3:])])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_grpo_without_scale_is_dr_grpo() -> None:
    found = estimated("grpo", scale="none", std_epsilon=None)
    assert estimated("dr_grpo").tolist() == found.tolist()
    np.testing.assert_allclose(found[3:], [-1.0, 1.0])


def test_rloo_compares_each_sample_with_the_mean_of_the_other_samples() -> None:
    found = estimated("rloo")
    others = [np.delete(REWARDS[:3], i).mean() for i in range(3)] + [7.0, 5.0]
    np.testing.assert_allclose(found, REWARDS - others, rtol=1e-6)


def test_opo_weights_the_baseline_by_length() -> None:
    found = estimated("opo")
    np.testing.assert_allclose(found[:3], REWARDS[:3] - (3 * 1.0 + 1 * 0.0 + 4 * 0.25) / 8, rtol=1e-6)
    np.testing.assert_allclose(found[3:], REWARDS[3:] - (2 * 5.0 + 6 * 7.0) / 8, rtol=1e-6)


def test_opo_with_equal_lengths_only_subtracts_the_mean() -> None:
    found = advantages.opo(REWARDS, GROUPS, np.full(5, 4))
    np.testing.assert_allclose(found, advantages.grpo(REWARDS, GROUPS, std_epsilon=None))


def test_reinforce_pp_whitens_over_all_tokens_of_the_step() -> None:
    tokens = np.repeat(REWARDS, TOKENS)
    expected = (REWARDS - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(estimated("reinforce_pp"), expected, rtol=1e-6)


def test_reinforce_pp_with_baseline_whitens_rewards_minus_their_group_mean() -> None:
    left = REWARDS - np.repeat([REWARDS[:3].mean(), 6.0], [3, 2])
    tokens = np.repeat(left, TOKENS)
    expected = (left - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(estimated("reinforce_pp_baseline"), expected, rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_equal_rewards_have_no_advantage(name: str) -> None:
    assert not estimated(name, np.full(5, 2.0)).any()


@pytest.mark.parametrize("name", [*INVARIANT_ADVANTAGES, "grpo"])
def test_invariant_advantages_ignore_scale_and_offset(name: str) -> None:
    np.testing.assert_allclose(estimated(name, 40 * REWARDS - 3), estimated(name), rtol=1e-4)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo"])
def test_the_other_advantages_depend_on_the_scale(name: str) -> None:
    assert np.abs(estimated(name, 40 * REWARDS) - estimated(name)).max() > 1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_step_without_samples_gives_no_advantages(name: str) -> None:
    assert estimated(name, np.zeros(0), np.zeros(0, int)).shape == (0,)


# ------------------------------------------------------------------------------------- user functions


OWN = """
import numpy as np

def ranks(rewards, groups, loss_tokens, *, factor):
    return factor * np.argsort(np.argsort(rewards))

def pairs(rewards, groups, loss_tokens):
    return np.stack([rewards, rewards])

def letters(rewards, groups, loss_tokens):
    return np.full(len(rewards), "a")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rlbus_test_estimator.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own")
def test_a_user_estimator_is_called_with_its_params() -> None:
    found = estimated("rlbus_test_estimator:ranks", params={"factor": 2})
    assert found.tolist() == [4.0, 0.0, 2.0, 6.0, 8.0]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("rlbus_test_estimator:ranks", {}, "missing a required"),
        ("rlbus_test_estimator:rank", {}, "has no function 'rank'"),
        ("rlbus_no_such_module:fn", {}, "cannot be imported"),
    ],
)
def test_an_estimator_that_cannot_be_called_is_refused_at_the_start(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        Estimator(Advantage(name=name, params=params))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own")
def test_an_estimator_that_does_not_return_one_number_per_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returned float64 \[2, 5\]; it must return 5 numbers"):
        estimated("rlbus_test_estimator:pairs")
    with pytest.raises(ValueError, match="returned <U1 "):
        estimated("rlbus_test_estimator:letters")


def test_advantages_beyond_float32_are_left_for_the_caller_to_detect() -> None:
    rewards = np.array([3.4e38, -3.4e38, -3.4e38, -3.4e38])
    assert np.isinf(estimated("dr_grpo", rewards, np.zeros(4, int))).tolist() == [True, False, False, False]


# ------------------------------------------------------------------------------------ before the estimator


def test_overlong_penalty_falls_linearly_over_the_last_tokens() -> None:
    found = advantages.overlong_penalty(np.array([1, 6, 7, 8, 9, 10]), max_new_tokens=10, tokens=4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -0.75, -1.0])


def test_normalised_rewards_have_mean_0_and_deviation_1() -> None:
    found = advantages.normalised(REWARDS)
    np.testing.assert_allclose([found.mean(), found.std()], [0, 1], atol=1e-7)
    assert not advantages.normalised(np.full(3, 5.0)).any()


def test_rewards_are_shaped_in_the_documented_order(tmp_path: Path) -> None:
    make(tmp_path)
    topology = load(
        write(tmp_path),
        [
            "algorithm.normalise_rewards=batch",
            "algorithm.overlong_penalty={tokens: 4, factor: 2.0}",
            "algorithm.kl={estimator: k1, in: reward, coef: 0.5}",
        ],
    )
    scalars = {
        "reward": np.array([1.0, 3.0], np.float32),
        "length": np.array([6, 8]),
        "kl": np.array([0.2, -0.4], np.float32),
    }
    np.testing.assert_allclose(advantages.shaped(topology, scalars), [-1 - 2 * 0.5 - 0.1, 1 - 2 + 0.2], rtol=1e-6)
    del scalars["kl"]
    with pytest.raises(ValueError, match="no per-sample KL"):
        advantages.shaped(topology, scalars)
