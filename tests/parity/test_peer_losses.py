"""Compares advantages, losses, KL and their gradients with the values that TRL and verl computed for the same batch
(vectors/*.npz).

See README.md for how the vectors were recorded and where conventions differ.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer import advantages
from services.policy_trainer.update import sample_weights
from services.policy_trainer.worker.credit import gae
from services.policy_trainer.worker.loss import token_loss
from services.policy_trainer.worker.losses import divergence
from services.policy_trainer.worker.losses.tokens import TokenData
from services.policy_trainer.worker.losses.value import value_loss
from tests.parity.peers import inputs
from tests.unit.policy_trainer.training import token_data

Vectors = dict[str, Array]
PEERS = ("trl", "verl")
RTOL = 1e-6


@pytest.fixture(scope="module", params=PEERS)
def peer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def load(name: str) -> Vectors:
    with np.load(Path(__file__).parent / "vectors" / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def counts(vectors: Vectors) -> Array:
    return np.asarray(vectors["input/mask"].sum(axis=1))


def tokens(vectors: Vectors, aggregation: str) -> tuple[Tensor, TokenData, Tensor]:
    """Return the unmasked tokens of a worker (`cur`, data, entropy), with the token weights that the driver
    computes."""
    mask, lengths = vectors["input/mask"].astype(bool), counts(vectors)
    weights = sample_weights(aggregation, lengths, max_new_tokens=inputs.MAX_NEW_TOKENS).astype(np.float64)

    def flat(name: str) -> Tensor:
        return torch.from_numpy(vectors[f"input/{name}"][mask])

    def spread(values: Array) -> Tensor:
        return torch.from_numpy(np.repeat(values, lengths))

    data = token_data(
        rollout=flat("rollout"),
        prox=flat("prox"),
        ref=flat("ref"),
        advantages=spread(vectors["input/advantages"]),
        weights=spread(weights),
        versions=torch.zeros(int(lengths.sum())),
        sequences=spread(np.arange(len(lengths))),
        sequence_count=len(lengths),
    )
    return flat("cur").requires_grad_(), data, flat("entropy").requires_grad_()


def spec(name: str, **options: Any) -> LossSpec:
    return LossSpec(
        name=name,
        **{
            "clip_low": inputs.CLIP_LOW,
            "clip_high": inputs.CLIP_HIGH,
            "anchor": "proximal",
            "temperature": 1.0,
            "gate_positive": inputs.SAPO_POSITIVE,
            "gate_negative": inputs.SAPO_NEGATIVE,
            **options,
        },
    )


def check(
    vectors: Vectors, case: str, loss: LossSpec, aggregation: str, *, corrected: bool = False, with_value: bool = True
) -> None:
    """Compare our loss and gradient with the peer's `case`. Without `corrected`, the engine and the trainer have the
    same log-probs."""
    cur, data, entropy = tokens(vectors, aggregation)
    if not corrected:
        assert data.prox is not None
        data = replace(data, shards={**data.shards, "rollout_logprobs": data.prox})
    total, _ = token_loss(loss, cur, data, entropy)
    grad, entropy_grad = torch.autograd.grad(total, [cur, entropy], allow_unused=True)
    mask = vectors["input/mask"].astype(bool)
    if with_value:
        np.testing.assert_allclose(total.detach().numpy(), vectors[f"{case}/loss"], rtol=RTOL)
    wanted = vectors[f"{case}/grad"]
    assert not wanted[~mask].any()
    np.testing.assert_allclose(grad.numpy(), wanted[mask], rtol=RTOL, atol=1e-12)
    if f"{case}/entropy_grad" in vectors:
        assert entropy_grad is not None
        np.testing.assert_allclose(entropy_grad.numpy(), vectors[f"{case}/entropy_grad"][mask], rtol=RTOL)


def test_the_recorded_batch_equals_the_compared_batch(peer: str) -> None:
    vectors = load(peer)
    for name, values in inputs.batch().items():
        assert np.array_equal(vectors[f"input/{name}"], values), name


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"])
def test_clipped_loss_matches_the_peers_under_every_aggregation(peer: str, aggregation: str) -> None:
    check(load(peer), f"ppo_clip/{aggregation}", spec("ppo_clip"), aggregation)


def test_trls_dapo_equals_token_mean() -> None:
    check(load("trl"), "ppo_clip/token_mean_dapo", spec("ppo_clip"), "token_mean")


def test_dual_clip_matches_the_peers(peer: str) -> None:
    check(load(peer), "dual_clip/token_mean", spec("ppo_clip", dual_clip=inputs.DUAL_CLIP), "token_mean")


def test_gspo_matches_the_peers(peer: str) -> None:
    loss = spec("gspo", clip_low=inputs.GSPO_CLIP, clip_high=inputs.GSPO_CLIP)
    check(load(peer), "gspo/seq_mean_token_mean", loss, "seq_mean_token_mean")


def test_cispo_matches_each_peer_with_its_clamp() -> None:
    upper = spec("cispo", clamp="upper", clip_high=inputs.CISPO_UPPER - 1.0)
    both = spec("cispo", clamp="both")
    check(load("trl"), "cispo/token_mean", upper, "token_mean")
    check(load("verl"), "cispo/token_mean", both, "token_mean")
    with pytest.raises(AssertionError):
        check(load("trl"), "cispo/token_mean", both, "token_mean")


def test_sapo_matches_the_peers(peer: str) -> None:
    check(load(peer), "sapo/seq_mean_token_mean", spec("sapo"), "seq_mean_token_mean")


def test_kl_in_the_loss_and_entropy_bonus_match_trl() -> None:
    kl_spec = spec("ppo_clip", kl_estimator="k3", kl_coef=inputs.KL_COEF)
    check(load("trl"), "kl/token_mean", kl_spec, "token_mean")
    check(load("trl"), "entropy/token_mean", spec("ppo_clip", entropy_coef=inputs.ENTROPY_COEF), "token_mean")


@pytest.mark.parametrize(("peer_name", "case"), [("trl", "token_truncate"), ("verl", "tis")])
def test_truncated_importance_weight_matches_the_peers(peer_name: str, case: str) -> None:
    loss = spec("ppo_clip", tis_cap=inputs.TIS_CAP)
    check(load(peer_name), f"{case}/token_mean", loss, "token_mean", corrected=True)


@pytest.mark.parametrize(("peer_name", "case"), [("trl", "token_mask"), ("verl", "icepop")])
def test_token_mask_keeps_the_denominator(peer_name: str, case: str) -> None:
    loss = spec("ppo_clip", ratio_mask="token", mask_low=inputs.MASK_LOW, mask_high=inputs.MASK_HIGH)
    check(load(peer_name), f"{case}/token_mean", loss, "token_mean", corrected=True)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_sequence_masks_keep_the_same_sequences(level: str) -> None:
    verl = load("verl")
    _, data, _ = tokens(verl, "token_mean")
    assert data.prox is not None
    low, high = (
        (inputs.MASK_LOW, inputs.MASK_HIGH) if level == "sequence" else (inputs.GEOMETRIC_LOW, inputs.GEOMETRIC_HIGH)
    )
    loss = spec("ppo_clip", ratio_mask=level, mask_low=low, mask_high=high)
    found = divergence.kept(loss, data.prox, data).numpy()
    mask = verl["input/mask"].astype(bool)
    assert 0 < found.sum() < len(found)
    assert np.array_equal(found, verl[f"kept/{level}"][mask].astype(bool))
    if level == "sequence":
        ratio = np.broadcast_to(load("trl")["is_ratio/sequence_mask"], mask.shape)[mask]
        assert np.array_equal(found, ratio > 0)


def test_sequence_mask_matches_trl_when_its_weight_is_applied() -> None:
    """TRL multiplies by the sequence's ratio where we keep the token's ratio. The quotient of the two ratios accounts
    for the whole difference.
    """
    trl = load("trl")
    mask = trl["input/mask"].astype(bool)
    sequence_ratio = np.broadcast_to(trl["is_ratio/sequence_mask"], mask.shape)[mask]
    cur, data, entropy = tokens(trl, "token_mean")
    assert data.prox is not None
    token_ratio = (data.prox - data.rollout).exp()
    loss = spec("ppo_clip", ratio_mask="sequence", mask_low=inputs.MASK_LOW, mask_high=inputs.MASK_HIGH)
    total, _ = token_loss(loss, cur, data, entropy)
    (grad,) = torch.autograd.grad(total, cur)
    expected = trl["sequence_mask/token_mean/grad"][mask]
    np.testing.assert_allclose(grad.numpy() / token_ratio.numpy() * sequence_ratio, expected, rtol=RTOL, atol=1e-12)


def test_kl_estimators_match_verl() -> None:
    verl = load("verl")
    for name, function in divergence.KL_LOSSES.items():
        cur = torch.from_numpy(verl["input/cur"]).requires_grad_()
        values = function(cur, torch.from_numpy(verl["input/ref"]))
        np.testing.assert_allclose(values.detach().numpy(), verl[f"kl/{name}/value"], rtol=RTOL)
        (grad,) = torch.autograd.grad(values.sum(), cur)
        np.testing.assert_allclose(grad.numpy(), verl[f"kl/{name}/grad"], rtol=RTOL)


@pytest.mark.parametrize(
    ("peer_name", "case"),
    [
        ("trl", "grpo_group"),
        ("trl", "grpo_none"),
        ("trl", "rloo"),
        ("trl", "rloo_kl"),
        ("verl", "grpo"),
        ("verl", "grpo_none"),
        ("verl", "rloo"),
        ("verl", "opo"),
        ("verl", "reinforce_pp"),
        ("verl", "reinforce_pp_baseline"),
    ],
)
def test_advantages_match_the_peers(peer_name: str, case: str) -> None:
    vectors = load(peer_name)
    rewards, groups, lengths = vectors["input/rewards"], vectors["input/groups"], counts(vectors)
    centred = advantages.grpo(rewards, groups, std_epsilon=None)
    k1 = (vectors["input/mask"] * (vectors["input/prox"] - vectors["input/ref"])).sum(axis=1)
    found = {
        "grpo_group": lambda: advantages.grpo(rewards, groups, std_epsilon=1e-4),
        "grpo": lambda: advantages.grpo(rewards, groups, std_epsilon=1e-6),
        "grpo_none": lambda: centred,
        "rloo": lambda: advantages.rloo(rewards, groups),
        "rloo_kl": lambda: advantages.rloo(rewards - inputs.KL_COEF * k1, groups),
        "opo": lambda: advantages.opo(rewards, groups, lengths),
        "reinforce_pp": lambda: advantages.reinforce_pp(rewards, lengths),
        "reinforce_pp_baseline": lambda: advantages.reinforce_pp(centred, lengths),
    }[case]()
    np.testing.assert_allclose(found, vectors[f"advantage/{case}"], rtol=RTOL, atol=1e-12)


def test_gae_and_the_value_loss_equal_those_of_verl() -> None:
    vectors = load("verl")
    wanted = {name: vectors[f"critic/{name}"] for name in ("advantages", "returns", "loss", "clipped", "grad")}
    given = inputs.valued()
    for name, values in given.items():
        np.testing.assert_array_equal(values, vectors[f"valued/{name}"])
    rows, tokens = given["mask"].shape
    mask, lengths = given["mask"].ravel().astype(bool), np.full(rows, tokens)
    made, returns = gae(
        given["token_rewards"].ravel(),
        given["old_values"].ravel(),
        mask,
        lengths,
        gamma=inputs.GAMMA,
        lam=inputs.LAM,
    )
    np.testing.assert_array_equal(returns[mask], wanted["returns"].ravel()[mask])
    trained = made[mask]
    whitened = (trained - trained.mean()) / np.sqrt(trained.var(ddof=1) + advantages.WHITEN_EPSILON)
    np.testing.assert_allclose(whitened, wanted["advantages"].ravel()[mask], rtol=0, atol=1e-8)

    def flat(name: str) -> Tensor:
        return torch.from_numpy(given[name].ravel()[mask])

    values = flat("values").requires_grad_()
    loss = value_loss(values, flat("returns"), flat("old_values"), clip=inputs.VALUE_CLIP).mean()
    np.testing.assert_allclose(loss.detach().numpy(), wanted["loss"], rtol=1e-12)
    (grad,) = torch.autograd.grad(loss, values)
    np.testing.assert_allclose(grad.numpy(), wanted["grad"].ravel()[mask], rtol=1e-12, atol=1e-18)
