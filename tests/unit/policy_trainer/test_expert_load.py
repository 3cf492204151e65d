"""Tests the load-balancing loss and the metrics of the load against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proto.messages import ForwardBackwardDone, OptimStepDone
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.worker.experts import ExpertLoad
from shared.model.routing import Gating, Routed, Routers
from tests.unit.policy_trainer.test_numbers import step_batch
from tests.unit.shared.test_routing import mixture, routers_in

CPU = torch.device("cpu")


def routers_of(experts: int, chosen: int, layers: int = 1) -> Routers:
    modules = [torch.nn.Module() for _ in range(layers)]
    modules[0].top_k, modules[0].num_experts = chosen, experts  # type: ignore[assignment]
    return Routers(modules, Gating(sigmoid=False, normalises=True, casts=False, scale=1.0))


def routed(counts: list[list[int]], mass: torch.Tensor) -> Routed:
    zero = torch.zeros(())
    return Routed(torch.tensor(counts), mass, zero, zero, torch.zeros(0))


# Megatron's formula (`switch_load_balancing_loss_func`): coef E sum_e(mean probability * tokens of expert e) / (T k).
# With 4 tokens, 2 of 3 experts each, counts 4, 3, 1 and mean probabilities 0.5, 0.3, 0.2:
# 3 * (0.5 * 4 + 0.3 * 3 + 0.2 * 1) / (4 * 2) = 3 * 3.1 / 8.
def test_the_loss_is_megatrons() -> None:
    load = ExpertLoad(routers_of(3, 2), CPU)
    load.add(routed([[4, 3, 1]], torch.zeros(1, 3)))
    mass = torch.tensor([[2.0, 1.2, 0.8]], dtype=torch.float64)
    assert float(load.balance(0.1, mass)) == pytest.approx(0.1 * 3 * 3.1 / 8, rel=1e-12)


def test_a_uniform_load_costs_the_coefficient_in_each_layer() -> None:
    load = ExpertLoad(routers_of(4, 2, layers=2), CPU)
    load.add(routed([[3, 3, 3, 3]] * 2, torch.zeros(2, 4)))
    assert float(load.balance(0.5, torch.full((2, 4), 6 / 4))) == pytest.approx(2 * 0.5)


def test_the_parts_of_micro_batches_add_up_and_only_probabilities_have_a_gradient() -> None:
    load = ExpertLoad(routers_of(2, 1), CPU)
    for counts in ([[3, 0]], [[0, 1]]):
        load.add(routed(counts, torch.zeros(1, 2)))
    parts = [torch.tensor([[2.0, 1.0]], requires_grad=True), torch.tensor([[0.4, 0.6]], requires_grad=True)]
    total = load.balance(1.0, parts[0]) + load.balance(1.0, parts[1])
    assert total.item() == pytest.approx(2 * (0.75 * 2.4 + 0.25 * 1.6) / 4)
    total.backward()  # type: ignore[no-untyped-call]
    # E f_e / T, for every token alike
    for part in parts:
        assert part.grad is not None
        assert part.grad.tolist() == [pytest.approx([2 * 0.75 / 4, 2 * 0.25 / 4])]


def test_the_load_of_given_routes_counts_the_predictors_of_trained_tokens() -> None:
    routers = routers_in(mixture("qwen3_moe"))
    routes = torch.zeros(6, 2, 2, dtype=torch.int64)
    routes[..., 1] = torch.arange(6)[:, None] + 1
    load = ExpertLoad(routers, CPU)
    load.add_given(routers.packed(routes).numpy(), np.array([0, 1, 0, 0, 1, 1], np.uint8))
    # tokens 1, 4 and 5 are trained, and their predictors are 0, 3 and 4
    wanted = [3, 1, 0, 0, 1, 1, 0, 0]
    assert load.counts.tolist() == [wanted, wanted]


def test_metrics_name_the_worst_layer_and_all_unused_experts() -> None:
    load = ExpertLoad(routers_of(4, 1, layers=2), CPU)
    load.add(routed([[2, 2, 2, 2], [7, 1, 0, 0]], torch.zeros(2, 4)))
    assert load.metrics() == {"moe_load_max": 3.5, "moe_unused_max": 2.0}


def test_metrics_of_a_step_are_means_over_its_tokens_and_the_worst_of_its_updates() -> None:
    metrics = StepMetrics(step=1)
    for tokens, load in ((4.0, 2.0), (6.0, 3.0)):
        sums = {
            "tokens": tokens,
            "moe_entropy": 1.5 * tokens,
            "moe_load_max": load,
            "moe_unused_max": load - 2.0,
            "moe_strayed": 1.0,
            "balance": 0.5,
        }
        metrics.policy.add_gradient(ForwardBackwardDone(sums=sums, seconds=1.0))
        metrics.policy.add_update(OptimStepDone(grad_norm=1.0, lr=0.1, seconds=1.0))
    row = metrics.row(step_batch([1.0, 0.0, 1.0, 0.0]), step_s=1.0)
    found = {name: value for name, value in row.items() if name.startswith("moe/")}
    assert found == {
        "moe/entropy": 1.5,
        "moe/load_max": 3.0,
        "moe/unused_experts": 1.0,
        "moe/replay_mismatch": pytest.approx(0.2),
    }
    assert row["loss/load_balance"] == pytest.approx(0.5)
