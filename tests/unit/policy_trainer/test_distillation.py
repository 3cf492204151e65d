"""Tests the teacher's term of the loss: its formula, its gradient, and that a teacher equal to the anchor adds
nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proto.messages import LossSpec, TaskHandle
from services.policy_trainer.metrics import ModelMetrics, StepMetrics
from services.policy_trainer.worker.loss import BatchLoss, token_loss
from services.policy_trainer.worker.losses.divergence import forward_kl
from services.policy_trainer.worker.losses.tokens import TokenData
from services.policy_trainer.worker.samples import BatchTokens, check, leave_out
from shared.model import logprobs
from shared.model.logprobs import TokenScorer
from shared.rpc.errors import RpcError
from shared.topology.models import POLICY
from shared.topology.passes import FASTEST
from tests.unit.policy_trainer.training import token_data
from tests.unit.tiny_models import make_model, ragged

COEF = 0.7


def spec(anchor: str, **options: Any) -> LossSpec:
    fields = {"clip_low": 0.2, "clip_high": 0.2, "temperature": 1.0, "distill_coef": COEF, **options}
    return LossSpec(name="ppo_clip", anchor=anchor, **fields)


def tokens(rollout: Tensor, advantages: Tensor, weights: Tensor, **others: Tensor | None) -> TokenData:
    count = len(rollout)
    return token_data(
        rollout=rollout,
        advantages=advantages,
        weights=weights,
        versions=torch.zeros(count),
        sequences=torch.arange(count),
        sequence_count=count,
        **others,
    )


@pytest.mark.parametrize("anchor", ["rollout", "proximal", "present"])
def test_a_teacher_whose_log_probs_are_the_anchors_own_array_changes_nothing(anchor: str) -> None:
    logprobs = -torch.rand(50, generator=torch.Generator().manual_seed(1)) * 5
    cur = logprobs.clone().requires_grad_()
    own = cur.detach() if anchor == "present" else logprobs
    data = tokens(
        logprobs, torch.zeros(50), torch.ones(50), prox=logprobs if anchor == "proximal" else None, teacher=own
    )
    loss, sums = token_loss(spec(anchor), cur, data, torch.zeros(50))
    loss.backward()  # type: ignore[no-untyped-call]
    assert cur.grad is not None
    assert not cur.grad.any()
    assert float(sums["teacher_kl"]) == float(sums["teacher_gap_max"]) == float(loss.detach()) == 0.0


@pytest.mark.parametrize("anchor", ["rollout", "proximal"])
def test_the_advantage_of_a_token_is_lowered_by_how_much_likelier_its_anchor_is_than_the_teacher_finds_it(
    anchor: str,
) -> None:
    """Also when the policy has moved since the anchor's log-probs: a later update has the same advantages."""
    rng = np.random.default_rng(2)
    cur, rollout, prox, teacher, advantages = (rng.normal(scale=0.3, size=30) for _ in range(5))
    data = tokens(*map(torch.from_numpy, (rollout, advantages, np.ones(30))), **{
        "prox": torch.from_numpy(prox),
        "teacher": torch.from_numpy(teacher),
    })  # fmt: skip
    _, sums = token_loss(spec(anchor), torch.from_numpy(cur), data, torch.zeros(30))
    expected = 0.0
    for now, sampled, start, from_teacher, advantage in zip(cur, rollout, prox, teacher, advantages, strict=True):
        old = sampled if anchor == "rollout" else start
        lowered, ratio = advantage - COEF * (old - from_teacher), math.exp(now - old)
        value = -min(ratio * lowered, min(max(ratio, 0.8), 1.2) * lowered)
        expected += value * (math.exp(start - sampled) if anchor == "proximal" else 1.0)
    assert float(sums["policy"]) == pytest.approx(expected, rel=1e-12)
    old = rollout if anchor == "rollout" else prox
    assert float(sums["teacher_kl"]) == pytest.approx((old - teacher).sum(), rel=1e-12)
    assert float(sums["teacher_gap_max"]) == pytest.approx(np.abs(old - teacher).max(), rel=1e-12)


@pytest.mark.parametrize("anchor", ["rollout", "proximal", "present"])
def test_the_gradient_is_that_of_the_kl_to_the_teacher_at_each_sampled_prefix(anchor: str) -> None:
    """Every token of a small vocabulary is counted with its probability, which is the mean over samples."""
    made = torch.Generator().manual_seed(3)
    prefixes, words = 7, 5
    logits = torch.randn(prefixes, words, dtype=torch.float64, generator=made, requires_grad=True)
    teacher = torch.randn(prefixes, words, dtype=torch.float64, generator=made).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (COEF * (logprobs.exp() * (logprobs - teacher)).sum()).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    expected, logits.grad = logits.grad, None
    cur = logits.log_softmax(-1).flatten()
    sampled = cur.detach()
    data = tokens(sampled, torch.zeros_like(sampled), sampled.exp(), prox=sampled, teacher=teacher.flatten())
    loss, sums = token_loss(spec(anchor), cur, data, torch.zeros_like(sampled))
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert expected.abs().max() > 0.1
    assert (logits.grad - expected).abs().max() < 1e-12
    assert float(sums["teacher_kl"]) == pytest.approx(float((sampled - teacher.flatten()).sum()), rel=1e-12)


WORDS, TOP = 61, 9


def top_of(ids: np.ndarray, k: int, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [n, k] and float32 log-probs [n, k] of a teacher that disagrees with itself on equal prefixes."""
    rng = np.random.default_rng(seed)
    logprobs = torch.from_numpy(rng.normal(scale=2.0, size=(int(ids.sum()), WORDS))).log_softmax(-1).float()
    values, chosen = logprobs.topk(k)
    return chosen.numpy().astype(np.int32), values.numpy()


def oracle(cur: Tensor, chosen: np.ndarray, values: np.ndarray) -> Tensor:
    """Return the KL of each row of log-probs `cur` [n, V], with the tokens outside the top k as one token."""
    total = cur.new_zeros(len(cur))
    for row in range(len(cur)):
        own, left, rest = 0.0, 1.0, 1.0
        for token, value in zip(chosen[row], values[row], strict=True):
            p, q = math.exp(float(value)), cur[row, int(token)]
            own = own + p * (float(value) - q)
            left, rest = left - p, rest - q.exp()
        left = max(left, 1e-6)
        total[row] = own + left * (math.log(left) - rest.clamp(min=1e-6).log())
    return total


@pytest.mark.parametrize("head", ["blocks", "whole"])
@pytest.mark.parametrize("most", [1, 7, 1000])
@pytest.mark.parametrize("nodes", [17, 40, 4096])
def test_the_gradient_of_forward_kl_does_not_depend_on_blocks_micro_batches_and_shared_prefixes(
    monkeypatch: pytest.MonkeyPatch, head: str, most: int, nodes: int
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS", WORDS * most)
    model = make_model("qwen3", dtype=torch.float64, head_dim=12, passes=FASTEST.model_copy(update={"head": head}))
    ids, lengths, mask = ragged()
    chosen, values = top_of(mask, TOP)
    weights = np.random.default_rng(6).random(len(ids))
    starts, at = np.cumsum(lengths) - lengths, 0
    expected = torch.zeros((), dtype=torch.float64)
    for start, length in zip(starts, lengths, strict=True):
        tokens = torch.from_numpy(ids[start : start + length].astype(np.int64))
        trained = np.flatnonzero(mask[start : start + length])
        cur = (model(input_ids=tokens[None]).logits[0][trained - 1] / 0.8).log_softmax(-1)
        rows = slice(at, at + len(trained))
        distance = oracle(cur, chosen[rows], values[rows])
        expected = expected + COEF * (torch.from_numpy(weights[start + trained]) * distance).sum()
        at += len(trained)
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()

    flat = {"token_ids": ids, "lengths": lengths, "loss_mask": mask, "teacher_ids": chosen, "teacher_topk": values}
    flat["rollout_logprobs"] = np.zeros(len(ids), np.float32)
    flat["versions"] = np.zeros(len(ids), np.int32)
    loss = BatchLoss(spec("rollout", temperature=0.8, distill_top_k=TOP), flat, np.zeros(len(ids)), weights, "cpu")
    scorer, total, sums = TokenScorer(model), 0.0, {"teacher_kl": 0.0, "teacher_mass": 0.0, "tokens": 0.0}
    for batch in scorer.plan(ids, lengths, mask, 0.8, nodes):
        part, of_part = loss(scorer.score(batch, 0.8, "none", loss.others), lambda values: values)
        part.backward()
        total += float(part)
        sums = {name: value + float(of_part[name]) for name, value in sums.items()}
    assert total == pytest.approx(float(expected), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name
    assert sums["tokens"] == len(chosen)
    assert sums["teacher_mass"] == pytest.approx(np.exp(values.astype(np.float64)).sum(), rel=1e-12)


def test_with_the_whole_vocabulary_it_is_the_full_kl() -> None:
    made = torch.Generator().manual_seed(3)
    teacher = torch.randn(9, WORDS, dtype=torch.float64, generator=made).log_softmax(-1)
    logits = torch.randn(9, WORDS, dtype=torch.float64, generator=made, requires_grad=True)
    full = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    (expected,) = torch.autograd.grad(full.sum(), logits)
    found = forward_kl(logits.log_softmax(-1), teacher)
    assert (found - full).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient - expected).abs().max() < 1e-12


def test_a_policy_equal_to_its_teacher_has_no_forward_kl_and_no_gradient() -> None:
    """Also in float32, where 1 - sum(p) keeps no digit of a small tail."""
    logits = (torch.randn(40, WORDS, generator=torch.Generator().manual_seed(4)) * 9).requires_grad_()
    values = logits.log_softmax(-1).topk(TOP).values
    distance = forward_kl(values, values.detach())
    assert distance.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(distance.sum(), logits)
    assert gradient.abs().max() < 1e-5


def test_rows_of_samples_without_weight_are_dropped_with_their_mask() -> None:
    flat = {
        "lengths": np.array([3, 3], np.int32),
        "loss_mask": np.array([0, 1, 1, 0, 0, 1], np.uint8),
        "teacher_ids": np.array([[1], [2], [3]], np.int32),
    }
    tokens = BatchTokens(flat, np.array([6]), np.array([2]))
    leave_out(tokens, np.array([1, 1, 1, 0, 0, 0], bool))
    assert tokens.flat["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1]
    assert tokens.flat["teacher_ids"].tolist() == [[3]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"teacher_topk": np.zeros((3, 2), np.float32)}, r"teacher_topk has shape \[3, 2\], but its .* \[2, 2\]"),
        ({"teacher_topk": np.zeros((2, 3), np.float32)}, "teacher_topk has 3 columns, not 2"),
        ({"teacher_topk": np.array([[0, 0], [np.nan, 0]], np.float32)}, "not finite: 1, the first at trained 1"),
        ({"teacher_ids": np.zeros((2, 2), np.int64)}, "teacher_ids is int64"),
    ],
)
def test_top_k_shards_that_do_not_fit_the_trained_tokens_are_refused(change: dict[str, Any], why: str) -> None:
    columns = {
        "lengths": np.array([3], np.int32),
        "loss_mask": np.array([0, 1, 1], np.uint8),
        "teacher_ids": np.zeros((2, 2), np.int32),
        "teacher_topk": np.zeros((2, 2), np.float32),
    }
    handle = TaskHandle("train/0/0", 1, 1, 0, 0, [0])
    check([handle], {name: [array] for name, array in columns.items()})
    with pytest.raises(RpcError, match=why):
        check([handle], {name: [array] for name, array in {**columns, **change}.items()})


def test_a_row_has_the_mean_difference_to_the_teacher_and_the_largest() -> None:
    def row(sums: dict[str, float]) -> dict[str, float]:
        metrics = StepMetrics(step=1, models={POLICY: ModelMetrics(sums=sums)})
        return metrics._policy_row()

    made = row({"tokens": 4.0, "teacher_kl": 2.0, "teacher_gap_max": 1.5})
    assert (made["teacher/kl"], made["teacher/gap_max"]) == (0.5, 1.5)
    assert "teacher/mass" not in made
    made = row({"tokens": 4.0, "teacher_kl": 2.0, "teacher_mass": 3.8})
    assert (made["teacher/kl"], made["teacher/mass"]) == (0.5, 0.95)
    assert "teacher/gap_max" not in made
    assert not any(name.startswith("teacher/") for name in row({"tokens": 4.0}))
