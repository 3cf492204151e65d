"""Compares the token loss with its formula, for both anchors, and checks that the loss and its gradient do not depend
on the division into micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import check, token_loss
from shared.rpc.errors import RpcError
from shared.topology.algorithm import Optimizer
from tests.unit.policy_trainer.training import accumulate, one_rank, token_data
from tests.unit.tiny_models import ExactRMSNorm, make_model, plain_logprobs, ragged

OPTIMIZER = Optimizer(lr=1e-2, clip_norm=1e9)


def spec(anchor: str, **options: float | str) -> LossSpec:
    fields = {"clip_low": 0.2, "clip_high": 0.3, "temperature": 0.8, "kl_estimator": "k3", "kl_coef": 0.1, **options}
    return LossSpec(name="ppo_clip", anchor=anchor, **fields)  # type: ignore[arg-type]


def alone(tokens: int) -> dict[str, Any]:
    """Return sequence indices that make every token a sequence of its own."""
    return {"sequences": torch.arange(tokens), "sequence_count": tokens}


def by_hand(loss: LossSpec, cur: float, rollout: float, prox: float, ref: float, advantage: float) -> float:
    ratio = math.exp(cur - (rollout if loss.anchor == "rollout" else prox))
    clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
    value = -min(ratio * advantage, clipped * advantage)
    if loss.anchor == "proximal":
        value *= min(math.exp(prox - rollout), loss.tis_cap or math.inf)
    return value + loss.kl_coef * (math.exp(ref - cur) - (ref - cur) - 1)


@pytest.mark.parametrize("anchor", ["rollout", "proximal"])
@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_loss_follows_the_stated_formula(anchor: str, cap: float) -> None:
    loss = spec(anchor, tis_cap=cap)
    rng = np.random.default_rng(0)
    cur, rollout, prox, ref, advantage = (rng.normal(scale=0.5, size=40) for _ in range(5))
    weights = rng.uniform(size=40)
    tensors = {name: torch.from_numpy(value) for name, value in (("rollout", rollout), ("prox", prox), ("ref", ref))}
    data = token_data(
        advantages=torch.from_numpy(advantage),
        weights=torch.from_numpy(weights),
        versions=torch.zeros(40),
        **alone(40),
        **tensors,
    )
    total, sums = token_loss(loss, torch.from_numpy(cur), data, torch.zeros(40))
    expected = [
        w * by_hand(loss, *values) for w, *values in zip(weights, cur, rollout, prox, ref, advantage, strict=True)
    ]
    assert float(total) == pytest.approx(sum(expected), rel=1e-12)
    assert float(sums["loss"]) == pytest.approx(float(sums["policy"]) + loss.kl_coef * float(sums["kl"]), rel=1e-12)


def test_importance_weight_of_the_proximal_anchor_carries_no_gradient() -> None:
    prox = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    cur = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(3, dtype=torch.float64)
    data = token_data(
        rollout=ones * -2.0, advantages=ones, weights=ones, versions=ones, prox=prox.detach(), ref=None, **alone(3)
    )
    total, _ = token_loss(spec("proximal", tis_cap=2.0, kl_estimator="", kl_coef=0.0), cur, data, ones)
    total.backward()  # type: ignore[no-untyped-call]
    assert cur.grad is not None
    assert cur.grad.tolist() == [-2.0, -2.0, -2.0]  # exp(prox - rollout) is e, which is truncated at 2.


def test_a_clipped_token_is_counted_and_has_no_policy_gradient() -> None:
    cur = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, dtype=torch.float64)
    rollout = torch.tensor([-1.0, 0.0], dtype=torch.float64)  # The ratios are e and 1.
    data = token_data(rollout=rollout, advantages=ones, weights=ones, versions=ones, prox=None, ref=None, **alone(2))
    total, sums = token_loss(spec("rollout", kl_estimator="", kl_coef=0.0), cur, data, ones)
    total.backward()  # type: ignore[no-untyped-call]
    assert float(sums["clipped"]) == 1
    assert cur.grad is not None
    assert cur.grad.tolist() == [0.0, -1.0]


def test_an_unknown_loss_name_is_refused() -> None:
    with pytest.raises(RpcError, match="my_loss"):
        check(LossSpec(name="my_loss", clip_low=0.1, clip_high=0.1, anchor="rollout", temperature=1.0))


def backend(folder: Path, max_tokens: int, dtype: str) -> TorchBackend:
    make_model("qwen3", head_dim=12).save_pretrained(folder)
    made = one_rank(folder, dtype, OPTIMIZER, max_tokens=max_tokens)
    if dtype == "float64":
        for name, module in list(made.model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                parent, _, leaf = name.rpartition(".")
                setattr(made.model.get_submodule(parent), leaf, ExactRMSNorm(module))
    return made


def batch(seed: int = 3) -> tuple[dict[str, Array], Array, Array]:
    ids, lengths, mask = ragged(seed, tasks=8)
    rng = np.random.default_rng(seed)
    noise = {key: rng.normal(-2.0, 0.3, size=len(ids)) * mask for key in ("rollout_logprobs", "prox_logprobs")}
    flat: dict[str, Array] = {
        "token_ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "versions": np.where(mask, 4, -1).astype(np.int32),
        "ref_logprobs": rng.normal(-2.0, 0.3, size=len(ids)) * mask,
        **noise,
    }
    return flat, rng.normal(size=len(ids)), np.full(len(ids), 1.0 / mask.sum())


def gradient(made: TorchBackend) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in made.model.parameters() if each.grad is not None])


@pytest.mark.parametrize("anchor", ["rollout", "proximal"])
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-5)])
def test_micro_batches_do_not_change_gradient_or_sums(tmp_path: Path, anchor: str, dtype: str, limit: float) -> None:
    flat, advantages, weights = batch()
    if dtype == "float32":
        flat = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in flat.items()}
        advantages, weights = advantages.astype(np.float32), weights.astype(np.float32)
    whole = backend(tmp_path / "a", 100_000, dtype)
    sums = accumulate(whole, spec(anchor, tis_cap=2.0), flat, advantages, weights)
    wanted = gradient(whole)
    for max_tokens in (11, 40):
        split = backend(tmp_path / "b", max_tokens, dtype)
        split_sums = accumulate(split, spec(anchor, tis_cap=2.0), flat, advantages, weights)
        assert float((gradient(split) - wanted).norm() / wanted.norm()) <= limit
        assert split_sums == pytest.approx(sums, rel=1e-9 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("mask", ["", "sequence"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_current_policy_as_anchor_gives_the_gradient_of_a_separate_forward_pass(
    tmp_path: Path, dtype: str, mask: str
) -> None:
    flat, advantages, weights = batch()
    real = np.float64 if dtype == "float64" else np.float32
    flat = {key: value.astype(real) if value.dtype.kind == "f" else value for key, value in flat.items()}
    options = {"tis_cap": 2.0, "ratio_mask": mask, "mask_low": 1e-3, "mask_high": 1e3}
    made = backend(tmp_path, 40, dtype)
    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    flat["prox_logprobs"] = made.forward(sequences, spec("proximal").temperature).astype(real)
    before = accumulate(made, spec("proximal", **options), flat, advantages, weights)
    wanted = gradient(made)
    made.drop_gradients()
    del flat["prox_logprobs"]
    sums = accumulate(made, spec("present", **options), flat, advantages, weights)
    if dtype == "float32":
        assert torch.equal(gradient(made), wanted)
        assert sums == before
    else:  # Shards keep log-probs as float32.
        assert float((gradient(made) - wanted).norm() / wanted.norm()) <= 1e-6
    if mask:
        assert 0 < sums["masked"] < sums["tokens"]


def test_two_halves_of_a_batch_add_up_to_the_whole(tmp_path: Path) -> None:
    flat, advantages, weights = batch()
    made = backend(tmp_path, 100_000, "float64")
    accumulate(made, spec("rollout"), flat, advantages, weights)
    wanted = gradient(made)
    made.drop_gradients()
    middle = int(flat["lengths"][:16].sum())
    for tokens, sequences in ((slice(0, middle), slice(0, 16)), (slice(middle, None), slice(16, None))):
        part = {key: value[sequences if key == "lengths" else tokens] for key, value in flat.items()}
        accumulate(made, spec("rollout"), part, advantages[tokens], weights[tokens])
    assert float((gradient(made) - wanted).norm() / wanted.norm()) <= 1e-12


def test_the_gradient_equals_that_of_a_plain_formula(tmp_path: Path) -> None:
    flat, advantages, weights = batch()
    made = backend(tmp_path, 64, "float64")
    loss = spec("proximal", tis_cap=2.0)
    accumulate(made, loss, flat, advantages, weights)
    found = gradient(made)
    made.drop_gradients()
    cur = plain_logprobs(made.model, flat["token_ids"], flat["lengths"], flat["loss_mask"], loss.temperature)
    tensors = {key: torch.from_numpy(flat[f"{key}_logprobs"]) for key in ("rollout", "prox", "ref")}
    advantage, weight = torch.from_numpy(advantages), torch.from_numpy(weights * flat["loss_mask"])
    ratio = (cur - tensors["prox"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage)
    gain = gain * (tensors["prox"] - tensors["rollout"]).exp().clamp(max=loss.tis_cap)
    delta = tensors["ref"] - cur
    ((loss.kl_coef * (delta.exp() - delta - 1) - gain) * weight).sum().backward()  # type: ignore[no-untyped-call]
    wanted = gradient(made)
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-9
