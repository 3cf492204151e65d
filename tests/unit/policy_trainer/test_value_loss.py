"""The loss of a critic: numbers by hand, against a plain loop, and what a worker sums."""

from __future__ import annotations

import pytest
import torch

from proto.messages import LossSpec
from services.policy_trainer.update import value_spec
from services.policy_trainer.worker.loss import BatchLoss, check_value, value_token_loss
from services.policy_trainer.worker.losses import value_loss
from services.policy_trainer.worker.losses.tokens import TokenData
from shared.model.logprobs import Scores
from shared.rpc.errors import RpcError


@pytest.mark.parametrize(("returned", "loss", "slope"), [(1.0, 0.08, 0.0), (0.0, 0.245, 0.7)])
def test_the_worse_of_the_value_and_the_clipped_value_counts(returned: float, loss: float, slope: float) -> None:
    value = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    made = value_loss(value, torch.tensor([returned]).double(), torch.full((1,), 0.4, dtype=torch.float64), clip=0.2)
    torch.testing.assert_close(made, torch.tensor([loss], dtype=torch.float64), rtol=0, atol=1e-15)
    made.sum().backward()
    torch.testing.assert_close(value.grad, torch.tensor([slope], dtype=torch.float64), rtol=0, atol=1e-15)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, returns = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(value_loss(values, returns, returns, clip=None), (values - returns) ** 2 / 2)


def data(returns: torch.Tensor, old: torch.Tensor, weights: torch.Tensor) -> TokenData:
    shards = {"returns": returns, "values": old}
    return TokenData(shards, torch.zeros_like(old), weights, torch.zeros(len(old), dtype=torch.long), 1)


def test_a_worker_sums_the_weighted_loss_and_counts_values_beyond_the_clip() -> None:
    torch.manual_seed(3)
    values, returns, old = torch.randn(3, 50, dtype=torch.float64).unbind()
    weights = torch.rand(50, dtype=torch.float64)
    loss, sums = value_token_loss(value_spec(0.3), values, data(returns, old, weights))
    expected = sum(
        w / 2 * max((v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2)
        for v, r, o, w in zip(*(each.tolist() for each in (values, returns, old, weights)), strict=True)
    )
    assert float(loss) == pytest.approx(expected, rel=1e-14)
    assert sums.keys() == {"tokens", "loss", "value", "clipped"}
    assert int(sums["clipped"]) == int(((values - old).abs() > 0.3).sum()) > 0
    assert int(value_token_loss(value_spec(None), values, data(returns, old, weights))[1]["clipped"]) == 0


def test_the_loss_of_a_batch_reads_values_and_returns_and_nothing_of_the_policy() -> None:
    flat = {
        name: torch.tensor(values).numpy()
        for name, values in {
            "token_ids": [1, 2, 3],
            "lengths": [3],
            "sample_index": [0],
            "loss_mask": [0.0, 1.0, 1.0],
            "values": [0.0, 0.5, 0.25],
            "returns": [0.0, 1.0, 1.0],
        }.items()
    }
    nothing = torch.zeros(3).numpy()
    loss = BatchLoss(value_spec(0.2), flat, nothing, torch.ones(3).numpy(), "cpu")
    assert loss.entropy == "none"
    scores = Scores(torch.tensor([1, 2]), torch.tensor([0.5, 0.25]), None)
    total, sums = loss(scores, lambda tensor: tensor)
    assert float(total) == pytest.approx((0.25 + 0.5625) / 2)
    assert float(sums["tokens"]) == 2


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="values", temperature=1.0),
        LossSpec(name="value", clip_low=0.1, clip_high=0.2, anchor="values", temperature=1.0),
        LossSpec(name="value", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0),
    ],
)
def test_other_losses_are_refused_in_one_line(spec: LossSpec) -> None:
    with pytest.raises(RpcError, match=r"^loss .* a critic has loss value with anchor values"):
        check_value(spec)
