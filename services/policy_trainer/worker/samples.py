"""Joins the shards of a batch's tasks into flat arrays in a single copy, and spreads per-sample numbers over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from proto.messages import ErrorCode, TaskHandle
from proto.tensors import Array
from shared.batch import Batch
from shared.rpc.errors import RpcError
from shared.stages import PROXIMAL, REFERENCE, ROLLOUT

Columns = Mapping[str, Sequence[Array]]
"""The arrays of a batch by key, one per task."""
REF_KEY, PROX_KEY = REFERENCE.makes[0], PROXIMAL.makes[0]
SCORE_KEYS = PROXIMAL.needs
LOSS_KEYS = ROLLOUT.makes
_DTYPES = {
    "token_ids": np.int32,
    "lengths": np.int32,
    "sample_index": np.int32,
    "loss_mask": np.uint8,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
    PROX_KEY: np.float32,
    REF_KEY: np.float32,
}
"""dtypes of the keys, for a rank without any task from which to infer them."""


def stored_keys(batch: Batch, keys: Sequence[str]) -> dict[str, str]:
    """Return a dict that maps `keys` to the keys of their shards in the stores.

    Proximal log-probs are stored under a key specific to the call that computed them, so that they cannot be confused
    with earlier values from other weights or another number of ranks. Raises RpcError(bad_request) if they are needed
    but missing.
    """
    named = {key: key for key in keys}
    if PROX_KEY in named:
        made = [part.keys[0] for part in batch.meta.parts if part.stage == PROXIMAL.name and part.keys]
        if not made:
            raise RpcError(ErrorCode.BAD_REQUEST, f"anchor proximal without {PROX_KEY}: run forward first")
        named[PROX_KEY] = made[-1]
    return named


@dataclass(frozen=True)
class BatchTokens:
    """All sequences of a batch, ordered by task: `flat[key]` is [T] (or [S] for `lengths` and `sample_index`)."""

    flat: dict[str, Array]
    tokens_of_task: Array
    sequences_of_task: Array


def join(columns: Columns) -> BatchTokens:
    """Join the arrays of each key. The keys include `lengths`. Without tasks, the joined arrays have length 0."""
    lengths = columns["lengths"]
    return BatchTokens(
        flat={
            key: np.concatenate(arrays) if arrays else np.zeros(0, dtype=_DTYPES[key])
            for key, arrays in columns.items()
        },
        tokens_of_task=np.array([each.sum() for each in lengths], dtype=np.int64),
        sequences_of_task=np.array([len(each) for each in lengths], dtype=np.int64),
    )


def check(handles: Sequence[TaskHandle], columns: Columns) -> None:
    """Refuse shards with inconsistent lengths or non-finite values before any of them is used.

    Raises RpcError(bad_data) naming the tasks and the first invalid shard.
    """
    wrong: list[str] = []
    cause = ""
    for index, handle in enumerate(handles):
        found = _problem({key: arrays[index] for key, arrays in columns.items()}, handle.samples)
        if found:
            wrong.append(handle.task_id)
            cause = cause or f"{handle.task_id}: {found}"
    if wrong:
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"{cause}; shards of {len(wrong)} of {len(handles)} tasks refused, weights untouched",
            names=wrong,
        )


def _problem(task: dict[str, Array], samples: int) -> str:
    lengths = task["lengths"]
    total = int(lengths.sum())
    for key, values in task.items():
        wanted = len(lengths) if key in ("lengths", "sample_index") else total
        if values.shape != (wanted,):
            of = f"{len(lengths)} sequences of {total} tokens"
            return f"{key} has shape {list(values.shape)}, but its lengths say [{wanted}] ({of})"
    index = task.get("sample_index")
    if index is not None and ((index < 0) | (index >= samples)).any():
        return f"sample_index goes from {index.min()} to {index.max()}, but there are {samples} samples"
    for key, values in task.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = ~np.isfinite(values)
            return f"{key} has values that are not finite: {int(bad.sum())}, the first at token {int(bad.argmax())}"
    return ""


def spread(tokens: BatchTokens, samples_of_task: Sequence[int], values: Array) -> Array:
    """Return [T]: for each token, the entry of `values` [samples] for its sample, found through `sample_index`.

    Raises RpcError(bad_request) if the shards hold more samples than the batch states.
    """
    first = np.cumsum(samples_of_task) - np.asarray(samples_of_task)
    index = tokens.flat["sample_index"].astype(np.int64)
    allowed = np.repeat(np.asarray(samples_of_task), tokens.sequences_of_task)
    if not len(index) and not len(values):
        return values[:0]
    if len(values) != sum(samples_of_task) or (index >= allowed).any() or (index < 0).any():
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{len(values)} values for {sum(samples_of_task)} samples, sample_index up to {index.max()}: the batch and "
            "its shards disagree",
        )
    of_sequence = (np.repeat(first, tokens.sequences_of_task) + index).astype(np.int64)
    return np.repeat(values[of_sequence], tokens.flat["lengths"])


def trained(loss_mask: Array, weights: Array) -> Array:
    """Return `loss_mask` [T] without the tokens that have weight 0. They belong to masked-out samples and do not need
    to be scored."""
    return np.where(weights != 0, loss_mask, np.zeros_like(loss_mask))
