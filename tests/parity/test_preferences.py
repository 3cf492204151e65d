"""Checks losses of pairs: their values and gradients against TRL's, and the gradients of a model, however its batch is
divided, against autograd through the whole loss."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid

from proto.tensors import Array
from services.policy_trainer.preferences import compare
from services.policy_trainer.update import linear_spec
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.samples import BatchTokens, sample_totals
from services.rollout.sampling.trajectory import SequenceTokens, at_end
from shared.ranks.layout import Layout, RankPlace
from shared.topology.algorithm import Loss
from shared.topology.models import Head
from tests.parity.gradient_cases import VOCAB, Case, back
from tests.parity.groups import run_group
from tests.parity.peers import inputs
from tests.parity.test_gradients_torch import ALONE, backend_of
from tests.unit.tiny_models import plain_logprobs, plain_values

PAIRS, MICRO_BATCH = 5, 30
LOSSES = {
    "dpo": Loss(name="dpo", beta=inputs.DPO_BETA),
    "ipo": Loss(name="ipo", beta=inputs.DPO_BETA),
    "simpo": Loss(name="simpo", beta=inputs.SIMPO_BETA, margin=inputs.SIMPO_MARGIN),
    "bradley_terry": Loss(name="bradley_terry"),
}


def head_of(name: str) -> Head:
    return "value" if name == "bradley_terry" else "language"


def sequences(head: Head) -> list[SequenceTokens]:
    """Return a chosen and a rejected answer for each of several prompts, which the two share."""
    rng, made = np.random.default_rng(3), list[SequenceTokens]()
    for _ in range(PAIRS):
        prompt = rng.integers(3, VOCAB, size=rng.integers(1, 9))
        for _ in range(2):
            ids = np.concatenate([prompt, rng.integers(3, VOCAB, size=rng.integers(1, 8))]).astype(np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            zeros = np.zeros(len(ids), np.float32)
            one = SequenceTokens(ids, mask, zeros, np.where(mask, 0, -1).astype(np.int32))
            made.append(at_end(one) if head == "value" else one)
    return made


def batch(head: Head) -> dict[str, Array]:
    rows = sequences(head)
    flat = {key: np.concatenate([row.by_key()[key] for row in rows]) for key in rows[0].by_key()}
    return flat | {"lengths": np.array([len(row.token_ids) for row in rows], np.int32)}


def counts(flat: dict[str, Array]) -> Array:
    return np.array([part.sum() for part in np.split(flat["loss_mask"], np.cumsum(flat["lengths"])[:-1])], np.int64)


def reference_scores() -> Array:
    return np.random.default_rng(4).normal(-20.0, 3.0, size=2 * PAIRS)


def case_of(name: str, advantages: Array) -> Case:
    """Return the batch of a loss. All chosen answers belong to one rank and all rejected ones to another."""
    flat, ones = batch(head_of(name)), np.ones(2 * PAIRS)
    return Case(name, linear_spec(), flat, advantages, ones, np.arange(2 * PAIRS) % 2)


def gradient(name: str, backend: TorchBackend, place: RankPlace) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of a loss as a run computes it, and the loss: scores of the ranks, their comparison, and a
    linear loss."""
    loss, dp = LOSSES[name], place.layout.dp
    case = case_of(name, np.zeros(2 * PAIRS))
    flat, _, _ = case.of(place.dp_rank, dp)
    mine = np.flatnonzero(case.owner % dp == place.dp_rank)
    flat["sample_index"] = np.zeros(len(mine), np.int32)  # each sequence is a task here, so that ranks can divide pairs
    of_task = np.ones(len(mine), np.int64)
    # The passes of `backend_of` return float32; the scores are to be exact here.
    outputs = exact_forward(backend, flat)
    scores = torch.zeros(2 * PAIRS, dtype=torch.float64)
    tokens = BatchTokens(flat, flat["lengths"].astype(np.int64), of_task)
    scores[mine] = torch.from_numpy(sample_totals(tokens, of_task.tolist(), outputs))
    if dp > 1:
        torch.distributed.all_reduce(scores)
    compared = compare(loss, scores.numpy(), reference_scores(), counts(case.flat))
    back(backend, case_of(name, compared.advantages))
    found = {key: backend._trained.whole(master.grad) for key, master in backend._trained.masters.items()}
    backend.drop_gradients()
    return found, compared.loss


def exact_forward(backend: TorchBackend, flat: dict[str, Array]) -> Array:
    """Return the outputs [T] in float64."""
    outputs, scorer = np.zeros(len(flat["token_ids"])), backend._trained.scorer
    with torch.no_grad():
        for part in scorer.plan(flat["token_ids"], flat["lengths"], flat["loss_mask"], 1.0, 4096):
            scores = scorer.score(part, 1.0, "none")
            outputs[scores.tokens.numpy()] = scores.outputs.numpy()
    return outputs


def work(place: RankPlace, folder: Path) -> None:
    for name, max_tokens in itertools.product(LOSSES, (4096, MICRO_BATCH)):
        backend = backend_of("float64", place, folder, max_tokens, kind=head_of(name))
        found, _ = gradient(name, backend, place)
        if place.rank == 0:
            save_file(found, folder / f"rank-{place.rank}" / f"{name}-{max_tokens}.safetensors")


def autograd(name: str, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of the whole loss, written as its formula and computed one sequence at a time."""
    loss, head = LOSSES[name], head_of(name)
    backend, flat = backend_of("float64", ALONE, folder, kind=head), batch(head)
    model, arrays = backend.model, (flat["token_ids"], flat["lengths"], flat["loss_mask"])
    outputs = plain_values(model, *arrays) if head == "value" else plain_logprobs(model, *arrays, 1.0)
    s = torch.stack([part.sum() for part in outputs.split(flat["lengths"].tolist())])
    n, ref = torch.from_numpy(counts(flat)), torch.from_numpy(reference_scores())
    beta = torch.tensor(loss.beta or 0.0, dtype=torch.float64)
    if name == "dpo":
        ratio = s - ref
        total = -logsigmoid(beta * (ratio[0::2] - ratio[1::2])).mean()
    elif name == "ipo":
        ratio = (s - ref) / n
        total = (ratio[0::2] - ratio[1::2] - 1 / (2 * beta)).square().mean()
    elif name == "simpo":
        mean = s / n
        total = -logsigmoid(beta * (mean[0::2] - mean[1::2]) - loss.margin).mean()
    else:
        total = -logsigmoid(s[0::2] - s[1::2]).mean()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {key: each for key, each in zip(named, grads, strict=True) if each is not None}, float(total)


def test_gradients_equal_those_of_the_whole_loss_however_pairs_are_divided(tmp_path: Path) -> None:
    run_group("tests.parity.test_preferences:work", Layout(2), tmp_path / "dp2")
    for name in LOSSES:
        expected, total = autograd(name, tmp_path)
        scale = max(float(value.abs().max()) for value in expected.values())
        assert scale > 1e-3
        alone, loss = gradient(name, backend_of("float64", ALONE, tmp_path, kind=head_of(name)), ALONE)
        assert loss == pytest.approx(total, rel=1e-12)
        made = {"alone": alone}
        for max_tokens in (4096, MICRO_BATCH):
            made[f"dp2-{max_tokens}"] = load_file(tmp_path / "dp2" / "rank-0" / f"{name}-{max_tokens}.safetensors")
        for label, found in made.items():
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                error = float((found[key] - value).abs().max()) / scale
                assert error <= 1e-12, f"{name} {label} {key}: {error:.2e}"


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_match_trl(name: str) -> None:
    """TRL has all chosen samples first; here they alternate with the rejected ones."""
    with np.load(Path(__file__).parent / "vectors" / "trl_preferences.npz", allow_pickle=False) as file:
        trl = {key: file[key] for key in file.files}
    given = inputs.batch()
    mask, cur, ref = given["mask"], given["cur"], given["ref"]
    assert all(np.array_equal(trl[f"input/{key}"], given[key]) for key in ("mask", "cur", "ref"))
    order = np.arange(len(mask)).reshape(2, -1).T.reshape(-1)
    trained = mask if name != "bradley_terry" else (np.arange(mask.shape[1]) == mask.sum(1)[:, None] - 1)
    scores, reference = ((values * trained).sum(1)[order] for values in (cur, ref))
    compared = compare(LOSSES[name], scores, reference, mask.sum(1)[order])
    assert compared.loss == pytest.approx(float(trl[f"{name}/loss"]), rel=1e-12)
    gradient = np.zeros_like(cur)
    gradient[order] = -compared.advantages[:, None] * trained[order]
    np.testing.assert_allclose(gradient, trl[f"{name}/grad"], rtol=1e-12, atol=1e-15)
