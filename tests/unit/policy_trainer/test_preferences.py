"""Tests the comparison of answers in the driver: formulas by hand, what is refused, and the metrics of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proto.messages import BatchMeta, ForwardBackwardDone, StepBatch
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.preferences import compare
from shared.topology.algorithm import Loss

TOKENS = np.array([2, 4, 1, 1])
SCORES, REFERENCE = np.array([-2.0, -8.0, -3.0, -1.0]), np.array([-3.0, -6.0, -3.0, -3.0])


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_losses_margins_and_accuracy_equal_their_formulas() -> None:
    dpo = compare(Loss(name="dpo", beta=0.5), SCORES, REFERENCE, TOKENS)
    assert dpo.loss == pytest.approx((softplus(-0.5 * 3) + softplus(0.5 * 2)) / 2)
    assert (dpo.margin, dpo.accuracy) == (pytest.approx(0.25), 0.5)
    ipo = compare(Loss(name="ipo", beta=0.5), SCORES, REFERENCE, TOKENS)
    assert ipo.loss == pytest.approx(((0.5 + 0.5 - 1) ** 2 + (0 - 2 - 1) ** 2) / 2)
    simpo = compare(Loss(name="simpo", beta=2.0, margin=0.5), SCORES, None, TOKENS)
    assert simpo.loss == pytest.approx((softplus(0.5 - 2 * 1.0) + softplus(0.5 + 2 * 2.0)) / 2)
    assert simpo.margin == pytest.approx(2 * (1.0 - 2.0) / 2)  # without the margin that is aimed at
    model = compare(Loss(name="bradley_terry"), SCORES, None, TOKENS)
    assert model.loss == pytest.approx((softplus(-6) + softplus(2)) / 2)


def test_advantages_favour_the_chosen_answers_and_of_equal_lengths_add_up_to_zero() -> None:
    advantages = compare(Loss(name="dpo", beta=0.5), SCORES, REFERENCE, TOKENS).advantages
    assert advantages.dtype == np.float64
    assert (advantages[0::2] > 0).all()
    np.testing.assert_allclose(advantages[0::2], -advantages[1::2])


@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_answers_that_are_far_apart_give_finite_numbers(distance: float) -> None:
    for name in ("dpo", "simpo", "bradley_terry"):
        compared = compare(Loss(name=name, beta=1.0), np.array([distance, -distance]), np.zeros(2), np.ones(2))
        assert math.isfinite(compared.loss)
        assert np.isfinite(compared.advantages).all()


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="compares two answers of each row, but there are 3 samples"):
        compare(Loss(name="simpo", beta=1.0), SCORES[:3], None, TOKENS[:3])
    with pytest.raises(ValueError, match="needs the scores of the reference"):
        compare(Loss(name="dpo", beta=1.0), SCORES, None, TOKENS)


def test_a_step_reports_preferences_and_nothing_of_a_ratio() -> None:
    metrics = StepMetrics(step=1)
    metrics.add_compared(compare(Loss(name="dpo", beta=0.5), SCORES, REFERENCE, TOKENS))
    metrics.policy.add_gradient(ForwardBackwardDone(sums={"tokens": 8.0, "linear": 0.1, "version": 0.0}, seconds=1.0))
    row = metrics.row(StepBatch(step=1, batch=BatchMeta(tasks=[]), scalars={}), step_s=1.0)
    assert row["preference/accuracy"] == 0.5
    assert not row.keys() & {"loss/policy", "policy/entropy", "policy/clip_fraction", "policy/masked_fraction"}
