"""Compares every policy loss, KL and mismatch correction with its formula, in value and gradient, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proto.messages import ForwardBackwardDone, LossSpec
from services.policy_trainer.metrics import StepMetrics, add_up
from services.policy_trainer.update import sample_weights
from services.policy_trainer.worker.loss import check, token_loss
from services.policy_trainer.worker.losses import divergence
from services.policy_trainer.worker.losses.policy import POLICY_LOSSES, own_policy_loss
from services.policy_trainer.worker.losses.tokens import TokenData
from shared.rpc.errors import RpcError
from shared.topology.algorithm import Loss
from tests.unit.policy_trainer.test_numbers import step_batch
from tests.unit.policy_trainer.training import token_data

LENGTHS = [4, 1, 7, 3]
M = sum(LENGTHS)


def spec(name: str, **options: Any) -> LossSpec:
    defaults: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "anchor": "rollout",
        "temperature": 1.0,
        "clamp": "upper",
        "gate_positive": 1.0,
        "gate_negative": 1.05,
    }
    return LossSpec(name=name, **(defaults | options))


def data(seed: int = 0, *, spread: float = 0.4, **changed: Any) -> tuple[Tensor, TokenData]:
    rng = np.random.default_rng(seed)

    def normal() -> Tensor:
        return torch.from_numpy(rng.normal(-1.0, spread, size=M))

    cur = normal().requires_grad_()
    fields: dict[str, Any] = {
        "rollout": normal(),
        "prox": normal(),
        "ref": normal(),
        "advantages": torch.from_numpy(np.repeat(rng.normal(size=len(LENGTHS)), LENGTHS)),
        "weights": torch.from_numpy(np.repeat(1.0 / np.array(LENGTHS) / len(LENGTHS), LENGTHS)),
        "versions": torch.zeros(M, dtype=torch.int32),
        "sequences": torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)),
        "sequence_count": len(LENGTHS),
    }
    return cur, token_data(**(fields | changed))


def gradient(total: Tensor, cur: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(total, cur)
    return found


def by_hand(loss: LossSpec, cur: float, anchor: float, advantage: float) -> tuple[float, float]:
    """Return the loss of one token, given its own ratio, and the derivative with respect to `cur`."""
    r = math.exp(cur - anchor)
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    match loss.name:
        case "ppo_clip":
            clipped = min(max(r, low), high)
            value, slope = -min(r * advantage, clipped * advantage), 0.0
            if r * advantage <= clipped * advantage:
                slope = -r * advantage
            if loss.dual_clip and advantage < 0 and -loss.dual_clip * advantage < value:
                value, slope = -loss.dual_clip * advantage, 0.0
            return value, slope
        case "cispo":
            weight = min(r, high) if loss.clamp == "upper" else min(max(r, low), high)
            return -weight * advantage * cur, -weight * advantage
        case "sapo":
            tau = loss.gate_positive if advantage > 0 else loss.gate_negative
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * advantage * r
        case "importance_sampling":
            return -r * advantage, -r * advantage
        case "cross_entropy":
            return -cur, -1.0
    raise AssertionError(loss.name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo_clip", {}),
        ("ppo_clip", {"dual_clip": 1.35}),
        ("cispo", {}),
        ("cispo", {"clamp": "both"}),
        ("sapo", {}),
        ("importance_sampling", {}),
        ("cross_entropy", {}),
    ],
)
def test_value_and_gradient_agree_with_the_formula(name: str, options: dict[str, Any]) -> None:
    loss = spec(name, **options)
    cur, tokens = data()
    total, _ = token_loss(loss, cur, tokens, torch.zeros(M))
    columns = (cur.tolist(), tokens.rollout.tolist(), tokens.advantages.tolist())
    expected = [by_hand(loss, *values) for values in zip(*columns, strict=True)]
    weights = tokens.weights.tolist()
    assert total.item() == pytest.approx(sum(w * value for w, (value, _) in zip(weights, expected, strict=True)), 1e-12)
    slopes = torch.tensor([w * slope for w, (_, slope) in zip(weights, expected, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(gradient(total, cur), slopes, rtol=1e-12, atol=1e-15)


def test_dual_clip_bounds_the_loss_only_where_the_advantage_is_negative() -> None:
    cur, tokens = data(spread=2.0)
    plain, _ = POLICY_LOSSES["ppo_clip"](spec("ppo_clip"), cur, tokens.rollout, tokens)
    dual, clipped = POLICY_LOSSES["ppo_clip"](spec("ppo_clip", dual_clip=1.5), cur, tokens.rollout, tokens)
    negative = tokens.advantages < 0
    bound = -1.5 * tokens.advantages
    assert bool((plain[negative] > bound[negative]).any())
    assert torch.equal(dual[negative], torch.minimum(plain, bound)[negative])
    assert torch.equal(dual[~negative], plain[~negative])
    assert bool(clipped[negative & (plain > bound)].all())


@pytest.mark.parametrize("bounds", [(0.05, 0.1), (0.9, 9.0)])
def test_gspo_has_the_gradient_of_the_sequence_ratio(bounds: tuple[float, float]) -> None:
    low, high = bounds
    loss = spec("gspo", clip_low=low, clip_high=high)
    cur, tokens = data(spread=0.2)
    total, sums = token_loss(loss, cur, tokens, torch.zeros(M))
    found = gradient(total, cur)
    objective = torch.zeros((), dtype=torch.float64)
    for part, advantage in zip(
        torch.split(cur - tokens.rollout, LENGTHS),
        [each[0] for each in torch.split(tokens.advantages, LENGTHS)],
        strict=True,
    ):
        s = part.mean().exp()
        objective = objective - torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage) / len(LENGTHS)
    assert total.item() == pytest.approx(objective.item(), rel=1e-12)
    torch.testing.assert_close(found, gradient(objective, cur), rtol=1e-12, atol=1e-15)
    assert (0 < float(sums["clipped"]) < M) == (high < 1)


def test_gspo_of_a_multi_sequence_sample_is_the_token_weighted_mean_of_its_sequences_losses() -> None:
    """Sequences 0 and 1 are one sample of a workflow that begins new contexts; each has its own ratio."""
    loss = spec("gspo", clip_low=0.05, clip_high=0.1)
    counts = torch.tensor([LENGTHS[0] + LENGTHS[1], LENGTHS[2], LENGTHS[3]])
    sample = torch.tensor([0, 0, 1, 2])
    weights = sample_weights("seq_mean_token_mean", counts.numpy(), max_new_tokens=8).astype(np.float64)
    advantages = np.array([1.3, -0.7, 0.4])

    def spread(values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.repeat(values[sample], LENGTHS))

    cur, tokens = data(spread=0.2, weights=spread(weights), advantages=spread(advantages))
    total, _ = token_loss(loss, cur, tokens, torch.zeros(M))
    objective = torch.zeros((), dtype=torch.float64)
    for part, which in zip(torch.split(cur - tokens.rollout, LENGTHS), sample.tolist(), strict=True):
        s, advantage = part.mean().exp(), float(advantages[which])
        share = len(part) / int(counts[which])
        objective = objective - share * torch.minimum(s * advantage, s.clamp(0.95, 1.1) * advantage) / 3
    assert total.item() == pytest.approx(objective.item(), rel=1e-6)  # The driver's weights are float32.
    torch.testing.assert_close(gradient(total, cur), gradient(objective, cur), rtol=1e-6, atol=1e-9)


def test_gspo_includes_the_parts_of_a_sequence_on_other_ranks() -> None:
    """With context parallelism, each rank has half of the tokens and the sums are reduced over both ranks."""
    loss = spec("gspo", clip_low=0.05, clip_high=0.1)
    cur, tokens = data(spread=0.2)
    whole = gradient(token_loss(loss, cur, tokens, torch.zeros(M))[0], cur)
    log_ratio = (cur - tokens.rollout).detach()
    halves = [torch.arange(M) % 2 == rank for rank in (0, 1)]

    def part(rank: int) -> TokenData:
        mine, others = halves[rank], halves[1 - rank]
        other_sums = [
            torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, tokens.sequences[others], values[others])
            for values in (log_ratio, torch.ones_like(log_ratio))
        ]
        answers = iter(other_sums)
        columns = {
            name: getattr(tokens, name)[mine]
            for name in ("rollout", "advantages", "weights", "versions", "prox", "ref", "sequences")
        }
        return token_data(**columns, sequence_count=len(LENGTHS), add_up=lambda sums: sums + next(answers))

    for rank, mine in enumerate(halves):
        total, _ = token_loss(loss, cur[mine], part(rank), torch.zeros(int(mine.sum())))
        torch.testing.assert_close(gradient(total, cur)[mine], whole[mine], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_log_ratios_give_finite_gradients(name: str) -> None:
    cur, tokens = data()
    far = token_data(
        **{
            **{key: getattr(tokens, key).float() for key in ("advantages", "weights")},
            "rollout": cur.detach().float() + torch.tensor([400.0, -400.0] * M)[:M],
            "prox": None,
            "ref": None,
            "versions": tokens.versions,
            "sequences": tokens.sequences,
            "sequence_count": tokens.sequence_count,
        }
    )
    low = cur.detach().float().requires_grad_()
    total, _ = token_loss(spec(name), low, far, torch.zeros(M))
    assert bool(torch.isfinite(gradient(total, low)).all())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_batch_without_tokens_has_no_loss(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    nothing = token_data(
        rollout=empty,
        advantages=empty,
        weights=empty,
        versions=empty,
        prox=None,
        ref=None,
        sequences=torch.zeros(0, dtype=torch.int64),
        sequence_count=2,
    )
    total, sums = token_loss(spec(name), empty, nothing, empty)
    assert total.item() == 0
    assert float(sums["tokens"]) == 0
    assert gradient(total, empty).shape == (0,)


# ------------------------------------------------------------------------------- rollout mismatch


def weight_of(tokens: TokenData, **options: Any) -> Tensor:
    """Return the factor by which each token's policy loss is multiplied, read from the gradient of cross-entropy."""
    loss = spec("cross_entropy", anchor="proximal", **options)
    cur = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    total, _ = token_loss(loss, cur, tokens, torch.zeros(M))
    return -gradient(total, cur) / tokens.weights


def test_importance_weight_is_truncated_at_the_cap() -> None:
    _, tokens = data(spread=0.8)
    assert tokens.prox is not None
    ratio = (tokens.prox - tokens.rollout).exp()
    torch.testing.assert_close(weight_of(tokens), ratio)
    torch.testing.assert_close(weight_of(tokens, tis_cap=1.3), ratio.clamp(max=1.3))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratio_mask_drops_exactly_the_tokens_outside_its_range(level: str) -> None:
    _, tokens = data(spread=0.5)
    assert tokens.prox is not None
    difference = tokens.prox - tokens.rollout
    ratio = difference.exp()
    if level != "token":
        parts = torch.split(difference, LENGTHS)
        chosen = [each.sum() if level == "sequence" else each.mean() for each in parts]
        ratio = torch.repeat_interleave(torch.stack(chosen).exp(), torch.tensor(LENGTHS))
    low, high = 0.85, 1.4
    inside = (ratio >= low) & (ratio <= high)
    assert 0 < int(inside.sum()) < M
    found = weight_of(tokens, ratio_mask=level, mask_low=low, mask_high=high)
    torch.testing.assert_close(found, torch.where(inside, difference.exp(), torch.zeros(M, dtype=torch.float64)))


def test_ratio_mask_counts_the_dropped_tokens_and_does_not_change_the_kl() -> None:
    cur, tokens = data()
    nothing = spec("ppo_clip", anchor="proximal", ratio_mask="token", mask_low=0.0, mask_high=1e-9)
    total, sums = token_loss(nothing, cur, tokens, torch.zeros(M))
    assert (total.item(), float(sums["masked"]), float(sums["clipped"])) == (0.0, M, 0.0)
    with_kl = spec("ppo_clip", anchor="proximal", ratio_mask="token", mask_high=1e-9, kl_estimator="k3", kl_coef=0.1)
    total, sums = token_loss(with_kl, cur, tokens, torch.zeros(M))
    assert tokens.ref is not None
    expected = 0.1 * (tokens.weights * divergence.k3(cur, tokens.ref)).sum().item()
    assert total.item() == pytest.approx(expected, rel=1e-12)


# -------------------------------------------------------------------------------------- KL and entropy


def test_k2_and_k3_follow_their_formulas_and_k1_is_not_offered() -> None:
    cur, tokens = data()
    ref = tokens.ref
    assert ref is not None
    delta = ref - cur
    torch.testing.assert_close(divergence.k2(cur, ref), delta**2 / 2)
    torch.testing.assert_close(divergence.k3(cur, ref), delta.exp() - delta - 1)
    torch.testing.assert_close(gradient(divergence.k2(cur, ref).sum(), cur), (cur - ref).detach())
    assert set(divergence.KL_LOSSES) == {"k2", "k3"}
    with pytest.raises(RpcError, match="KL k1"):
        check(spec("ppo_clip", kl_estimator="k1"))


@pytest.mark.parametrize(("estimator", "rel"), [("k3", 0.05), ("k2", 0.05)])
def test_kl_estimators_estimate_the_kl_and_k1_has_no_gradient(estimator: str, rel: float) -> None:
    """The estimators are summed over a small vocabulary, weighted by probability, which gives exact expectations."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=12)).requires_grad_()
    ref = (logits.detach() + torch.from_numpy(rng.normal(scale=0.05, size=12))).log_softmax(0)
    cur = logits.log_softmax(0)
    p = cur.detach().exp()
    true_kl = (cur.exp() * (cur - ref)).sum()
    found = (p * divergence.KL_LOSSES[estimator](cur, ref)).sum()
    assert float(found) == pytest.approx(float(true_kl), rel=rel)
    k1_gradient = gradient((p * (cur - ref)).sum(), logits)
    assert float(k1_gradient.abs().max()) < 1e-15


def test_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(M, 9))).requires_grad_()
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    _, tokens = data(advantages=torch.zeros(M, dtype=torch.float64))
    total, sums = token_loss(spec("ppo_clip", entropy_coef=0.3), logprobs[:, 0], tokens, entropy)
    assert float(sums["entropy"]) == pytest.approx(float(entropy.sum()))
    (found,) = torch.autograd.grad(total, logits)
    p, h = logprobs.detach().exp(), entropy.detach()[:, None]
    expected = 0.3 * tokens.weights[:, None] * p * (logprobs.detach() + h)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-15)


def test_sums_add_up_for_any_split() -> None:
    loss = spec("gspo", anchor="proximal", kl_estimator="k2", kl_coef=0.1, entropy_coef=0.1, tis_cap=1.5)
    cur, tokens = data()
    entropy = torch.rand(M, dtype=torch.float64)
    _, whole = token_loss(loss, cur, tokens, entropy)
    added: dict[str, float] = {}
    for chosen in (tokens.sequences < 2, tokens.sequences >= 2):
        names = ("rollout", "advantages", "weights", "versions", "prox", "ref", "sequences")
        part = token_data(**{name: getattr(tokens, name)[chosen] for name in names}, sequence_count=len(LENGTHS))
        add_up(added, token_loss(loss, cur[chosen], part, entropy[chosen])[1])
    assert added["mismatch_max"] > 0
    assert added == pytest.approx({name: float(value) for name, value in whole.items()}, rel=1e-12)


@pytest.mark.parametrize(("anchor", "cap"), [("proximal", 1.5), ("proximal", 0.0), ("present", 2.0), ("rollout", 0.0)])
def test_metrics_of_importance_weights_follow_their_formulas(anchor: str, cap: float) -> None:
    cur, tokens = data(spread=0.8)
    loss = spec("ppo_clip", anchor=anchor, tis_cap=cap)
    own = tokens.prox if anchor == "proximal" else cur.detach()
    assert own is not None
    metrics = StepMetrics(step=1)
    for chosen in (tokens.sequences < 2, tokens.sequences >= 2):
        names = ("rollout", "advantages", "weights", "versions", "prox", "ref", "sequences")
        part = token_data(**{name: getattr(tokens, name)[chosen] for name in names}, sequence_count=len(LENGTHS))
        _, sums = token_loss(loss, cur[chosen], part, torch.zeros(int(chosen.sum())))
        metrics.policy.add_gradient(
            ForwardBackwardDone(sums={name: float(value) for name, value in sums.items()}, seconds=0.1)
        )
    row = metrics.row(step_batch([1, 0, 0, 0]), step_s=1.0)
    w = np.exp(own.numpy() - tokens.rollout.numpy())
    v = np.minimum(w, cap) if cap else w
    expected = {
        "rollout/kl": np.mean(tokens.rollout.numpy() - own.numpy()),
        "rollout/k3_kl": np.mean(w - np.log(w) - 1),
        "rollout/is_mean": v.mean(),
        "rollout/is_max": w.max(),
        "rollout/is_eff_sample_size": v.mean() ** 2 / np.mean(v**2),
    }
    expected |= {"rollout/is_capped_fraction": np.mean(w > cap)} if cap else {}
    assert {name: row[name] for name in row if name.startswith(("rollout/is_", "rollout/k"))} == pytest.approx(
        expected, rel=1e-9
    )
    assert 0.2 < row["rollout/is_eff_sample_size"] < 0.95
    assert 0 < row.get("rollout/is_capped_fraction", 0.5) < 1


def test_supervised_tokens_have_no_importance_weights() -> None:
    cur, tokens = data()
    _, sums = token_loss(spec("cross_entropy"), cur, tokens, torch.zeros(M))
    metrics = StepMetrics(step=1)
    metrics.policy.add_gradient(
        ForwardBackwardDone(sums={name: float(each) for name, each in sums.items()}, seconds=0.1)
    )
    row = metrics.row(step_batch([1, 0, 0, 0]), step_s=1.0)
    assert not [name for name in row if name.startswith(("rollout/is_", "rollout/k"))]


@pytest.mark.parametrize("anchor", ["proximal", "present", "rollout"])
def test_the_engines_error_is_distinguished_from_policy_movement(anchor: str) -> None:
    versions = torch.tensor([6, 5, 4] * M, dtype=torch.int32)[:M]
    cur, tokens = data(versions=versions)
    loss = spec("ppo_clip", anchor=anchor)
    own = tokens.prox if anchor == "proximal" else cur.detach()
    assert own is not None
    found = (own - tokens.rollout).abs()
    _, sums = token_loss(loss, cur, tokens, torch.zeros(M), version=6)
    same = versions == 6
    assert (int(sums["engine_tokens"]), int(sums["lag_tokens"])) == (int(same.sum()), int((~same).sum()))
    torch.testing.assert_close(sums["engine"], found[same].sum())
    torch.testing.assert_close(sums["engine_max"], found[same].max())
    torch.testing.assert_close(sums["lag"], found[~same].sum())
    torch.testing.assert_close(sums["engine"] + sums["lag"], sums["mismatch"])
    _, unknown = token_loss(loss, cur, tokens, torch.zeros(M))
    assert float(unknown["engine_tokens"]) == float(unknown["lag_tokens"]) == 0.0
    _, recited = token_loss(spec("cross_entropy", anchor=anchor), cur, tokens, torch.zeros(M), version=6)
    assert not {"mismatch", "mismatch_max", "engine", "engine_tokens", "lag", "lag_tokens"} & recited.keys()


# ------------------------------------------------------------------------------------- user functions


OWN = """
def scaled(cur, anchor, tokens, *, factor):
    return -factor * tokens.advantages * cur

def summed(cur, anchor, tokens):
    return cur.sum()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rlbus_test_loss.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own")
def test_a_user_loss_is_weighted_like_the_others() -> None:
    loss = spec("rlbus_test_loss:scaled", anchor="proximal", tis_cap=1.1)
    function = check(loss, own_policy_loss(Loss(name=loss.name, params={"factor": 2.0})))
    cur, tokens = data()
    total, _ = token_loss(loss, cur, tokens, torch.zeros(M), function)
    assert tokens.prox is not None
    weight = (tokens.prox - tokens.rollout).exp().clamp(max=1.1)
    torch.testing.assert_close(gradient(total, cur), -2 * tokens.weights * tokens.advantages * weight)


@pytest.mark.usefixtures("own")
def test_a_user_loss_must_return_one_value_per_token() -> None:
    function = own_policy_loss(Loss(name="rlbus_test_loss:summed"))
    cur, tokens = data()
    with pytest.raises(RpcError, match="must return one value per token"):
        token_loss(spec("rlbus_test_loss:summed"), cur, tokens, torch.zeros(M), function)


@pytest.mark.usefixtures("own")
def test_an_import_path_that_comes_only_from_a_message_is_refused() -> None:
    with pytest.raises(RpcError, match="or the topology's own"):
        check(spec("rlbus_test_loss:scaled"), own_policy_loss(Loss()))


@pytest.mark.usefixtures("own")
def test_a_loss_that_cannot_be_called_is_refused_at_the_start() -> None:
    with pytest.raises(RpcError, match="missing a required"):
        own_policy_loss(Loss(name="rlbus_test_loss:scaled"))
