"""Provides optimizer batches whose gradients every backend must compute, however the batches are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.update import sample_weights
from services.policy_trainer.worker.backend import Backend, Sequences, TokenLoss
from services.policy_trainer.worker.loss import BatchLoss
from shared.model.logprobs import Scores
from shared.ranks.layout import RankPlace
from shared.topology.models import Head
from tests.unit.tiny_models import with_ends

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo")
MAX_NEW_TOKENS = 12
VOCAB = 61
RUNS = (("float64", 4096), ("float64", 30), ("float32", 30))
"""Precision and micro-batch size of each pass over all cases. With small micro-batches, layers are also recomputed."""
PPO = LossSpec(
    name="ppo_clip",
    clip_low=0.2,
    clip_high=0.28,
    anchor="proximal",
    temperature=0.9,
    tis_cap=2.0,
    kl_estimator="k3",
    kl_coef=0.05,
    entropy_coef=0.01,
    dual_clip=1.5,
)
GSPO = LossSpec(
    name="gspo", clip_low=0.05, clip_high=0.05, anchor="rollout", temperature=1.0, kl_estimator="k2", kl_coef=0.05
)
# The selection of tokens depends on whole sequences, and each rank of a context group holds only a part of each.
MASKED = LossSpec(
    name="cispo",
    clip_low=0.3,
    clip_high=0.5,
    clamp="both",
    anchor="proximal",
    temperature=0.9,
    ratio_mask="sequence",
    mask_low=0.6,
    mask_high=1.5,
    entropy_coef=0.01,
)
SAPO = LossSpec(
    name="sapo",
    clip_low=0.0,
    clip_high=0.0,
    anchor="proximal",
    temperature=1.1,
    gate_positive=1.0,
    gate_negative=1.05,
    ratio_mask="geometric",
    mask_low=0.8,
    mask_high=1.25,
    kl_estimator="k2",
    kl_coef=0.05,
)


# Per token and not per node of the tree: the sequences of a group share their prompt, but not their teacher's ids.
DISTILLED = LossSpec(
    name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=0.8, distill_coef=0.6, distill_top_k=7
)
OF_TRAINED = ("teacher_ids", "teacher_topk")


@dataclass(frozen=True)
class Case:
    """One optimizer batch. `flat` is the batch as workers concatenate it; `owner` [S] assigns a rank (modulo dp) to
    each sequence.
    """

    name: str
    spec: LossSpec
    flat: dict[str, Array]
    advantages: Array
    weights: Array
    owner: Array

    def of(self, dp_rank: int, dp: int) -> tuple[dict[str, Array], Array, Array]:
        """Return the flat arrays, advantages [T] and weights [T] of one data-parallel rank."""
        mine = (self.owner >= 0) & (self.owner % dp == dp_rank)
        lengths = self.flat["lengths"]
        tokens = np.repeat(mine, lengths)
        trained = tokens[self.flat["loss_mask"] != 0]
        of = {"lengths": mine} | dict.fromkeys(OF_TRAINED, trained)
        flat = {key: value[of.get(key, tokens)] for key, value in self.flat.items()}
        return (
            flat,
            np.repeat(self.advantages[mine], lengths[mine]),
            np.repeat(self.weights[mine], lengths[mine]),
        )


def cases_of(head: Head) -> list[Case]:
    """Return the cases for a model with `head`. Only the aggregation and the division of samples matter to a value
    loss."""
    return [case for case in cases() if head == "language" or case.name in (*AGGREGATIONS, "rank-empty")]


def forward(backend: Backend, case: Case, head: Head) -> Array:
    """Return the outputs of a forward pass of this rank. For a value model, each sequence also has the value after its
    last token."""
    flat, _, _ = case.of(backend.place.dp_rank, backend.place.layout.dp)
    arrays = flat["token_ids"], flat["lengths"], flat["loss_mask"]
    return backend.forward(Sequences(*(arrays if head == "language" else with_ends(*arrays))), case.spec.temperature)


def outputs_of(place: RankPlace, case: Case, outputs: Array) -> Array:
    """Return the part of one process's `forward` that the rank at `place` returns."""
    lengths = case.flat["lengths"] + (len(outputs) > len(case.flat["token_ids"]))
    return outputs[np.repeat(case.owner % place.layout.dp == place.dp_rank, lengths)]


def back(backend: Backend, case: Case, head: Head = "language") -> dict[str, float]:
    """Add the gradients of this rank's part of the case, and return its sums."""
    flat, advantages, weights = case.of(backend.place.dp_rank, backend.place.layout.dp)
    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    if head == "value":
        return backend.forward_backward(sequences, 1.0, squared_error(flat["returns"], weights), entropy="none")
    loss = BatchLoss(case.spec, flat, advantages, weights, "cpu")
    return backend.forward_backward(sequences, case.spec.temperature, loss, entropy=loss.entropy, others=loss.others)


def squared_error(returns: Array, weights: Array) -> TokenLoss:
    """Return the loss W (v - R)^2 / 2 of values v, for returns and weights [T]."""
    returns_T, weights_T = torch.from_numpy(returns), torch.from_numpy(weights)

    def loss(scores: Scores, _: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        errors = scores.outputs - returns_T[scores.tokens]
        total = (weights_T[scores.tokens] * errors.square() / 2).sum()
        return total, {"loss": total.detach(), "tokens": torch.tensor(len(errors))}

    return loss


def cases() -> Iterator[Case]:
    """Yield cases with four aggregations over ragged, unevenly masked samples, a rank whose tokens are all masked, an
    empty rank, sequence ratios, sequence masks and answers of a single token."""
    for index, aggregation in enumerate(AGGREGATIONS):
        yield _case(aggregation, PPO, aggregation, seed=index, owner=np.arange(9), masked_rows=())
    yield _case("rank-all-masked", PPO, "token_mean", seed=7, owner=np.arange(9), masked_rows=(1, 3, 5, 7))
    yield _case("rank-empty", PPO, "seq_mean_token_mean", seed=8, owner=np.zeros(9, np.int64), masked_rows=(2,))
    yield _case("gspo", GSPO, "seq_mean_token_mean", seed=9, owner=np.arange(9) // 5, masked_rows=())
    yield _case("sequences-masked", MASKED, "seq_mean_token_sum", seed=11, owner=np.arange(9), masked_rows=(4,))
    yield _case("distilled", DISTILLED, "seq_mean_token_sum", seed=14, owner=np.arange(9) // 4, masked_rows=(4,))
    yield _case("single-tokens", SAPO, "dr_grpo", seed=12, owner=np.arange(9), masked_rows=(), longest=1)


def nothing_trained() -> Iterator[Case]:
    """Yield a batch whose samples are all masked, and one without samples."""
    yield _case("all-masked", PPO, "token_mean", seed=13, owner=np.arange(9), masked_rows=tuple(range(9)))
    yield _case("empty", PPO, "token_mean", seed=13, owner=np.full(9, -1), masked_rows=tuple(range(9)))


def _case(
    name: str,
    spec: LossSpec,
    aggregation: str,
    *,
    seed: int,
    owner: Array,
    masked_rows: tuple[int, ...],
    longest: int = MAX_NEW_TOKENS,
) -> Case:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB, size=size) for size in (5, 1, 9)]
    ids, lengths, masks = [], [], []
    for row in range(9):
        answer = rng.integers(3, VOCAB, size=rng.integers(1, longest + 1))
        prompt = prompts[row % 3]
        mask = np.concatenate([np.zeros(len(prompt)), rng.random(len(answer)) < 0.7])
        ids.append(np.concatenate([prompt, answer]))
        masks.append(mask * (row not in masked_rows))
        lengths.append(len(mask))
    mask = np.concatenate(masks).astype(np.uint8)
    total = len(mask)
    near = rng.normal(-4.0, 0.6, total)
    flat: dict[str, Array] = {
        "token_ids": np.concatenate(ids).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "loss_mask": mask,
        "rollout_logprobs": (near + rng.normal(0, 0.3, total)).astype(np.float32),
        "prox_logprobs": near.astype(np.float32),
        "ref_logprobs": (near + rng.normal(0, 0.2, total)).astype(np.float32),
        "versions": np.zeros(total, np.int32),
        "returns": np.random.default_rng(seed).normal(size=total).astype(np.float32),
    }
    if spec.distill_top_k:
        shape = (int(mask.sum()), VOCAB)
        order = rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (shape[0], 1)), axis=1)
        flat["teacher_ids"] = order[:, : spec.distill_top_k]
        logits = rng.normal(scale=2.0, size=shape)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        flat["teacher_topk"] = logprobs[:, : spec.distill_top_k].astype(np.float32)
    counts = np.array([int(each.sum()) for each in masks])
    weights = sample_weights(aggregation, counts, max_new_tokens=MAX_NEW_TOKENS)
    return Case(name, spec, flat, rng.normal(size=9).astype(np.float32), weights, owner)
