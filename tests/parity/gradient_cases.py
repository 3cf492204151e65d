"""Provides optimizer batches whose gradients every backend must compute, however the batches are split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.update import sample_weights

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
        flat = {key: value[mine if key == "lengths" else tokens] for key, value in self.flat.items()}
        return (
            flat,
            np.repeat(self.advantages[mine], lengths[mine]),
            np.repeat(self.weights[mine], lengths[mine]),
        )


def cases() -> Iterator[Case]:
    """Yield cases with four aggregations over ragged, unevenly masked samples, a rank whose tokens are all masked, an
    empty rank, sequence ratios, sequence masks and answers of a single token."""
    for index, aggregation in enumerate(AGGREGATIONS):
        yield _case(aggregation, PPO, aggregation, seed=index, owner=np.arange(9), masked_rows=())
    yield _case("rank-all-masked", PPO, "token_mean", seed=7, owner=np.arange(9), masked_rows=(1, 3, 5, 7))
    yield _case("rank-empty", PPO, "seq_mean_token_mean", seed=8, owner=np.zeros(9, np.int64), masked_rows=(2,))
    yield _case("gspo", GSPO, "seq_mean_token_mean", seed=9, owner=np.arange(9) // 5, masked_rows=())
    yield _case("sequences-masked", MASKED, "seq_mean_token_sum", seed=11, owner=np.arange(9), masked_rows=(4,))
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
    }
    counts = np.array([int(each.sum()) for each in masks])
    weights = sample_weights(aggregation, counts, max_new_tokens=MAX_NEW_TOKENS)
    return Case(name, spec, flat, rng.normal(size=9).astype(np.float32), weights, owner)
