"""Joins the shards of a batch's tasks into flat arrays in a single copy, and spreads per-sample numbers over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from proto.ids import REVISION
from proto.messages import Credit, ErrorCode, Forward, ForwardBackward, ForwardBackwardModel, TaskHandle
from proto.tensors import Array
from services.policy_trainer.update import CREDIT_SCALE
from shared.batch import Batch
from shared.credit import KL_KEYS, kl_sums, sample_sums
from shared.rpc.errors import RpcError
from shared.stages import CREDIT, GIVEN, PROXIMAL, REFERENCE, TEACHER, VALUES, Per, declared, loss_keys

Columns = Mapping[str, Sequence[Array]]
"""The arrays of a batch by key, one per task."""
PROX_KEY = PROXIMAL.makes[0]
SCORE_KEYS = PROXIMAL.needs
TOKEN_ADVANTAGES, RETURNS = CREDIT.makes
TARGETS = GIVEN.makes[0]
_RUN_FIRST = dict.fromkeys((*PROXIMAL.makes, *VALUES.makes), "run forward first") | dict.fromkeys(
    CREDIT.makes, "run credit first"
)


Reads = Forward | Credit | ForwardBackward | ForwardBackwardModel
"""The calls that read shards."""


def keys_of(request: Reads) -> tuple[str, ...]:
    """Return the keys of the shards that a call reads."""
    if isinstance(request, Forward):
        of_samples = KL_KEYS if request.kl_estimator else ("sample_index",) if request.ends or request.sums else ()
        return (*SCORE_KEYS, *of_samples, *([request.routes] if request.routes else ()))
    if isinstance(request, Credit):
        spec = request.credit
        values = VALUES.makes if spec.values else ()
        teacher = TEACHER.makes[:1] if spec.distill_coef else ()
        return (*CREDIT.needs, *values, *(REFERENCE.makes if spec.kl_estimator else ()), *teacher)
    keys = tuple(key.name for key in loss_keys(request.loss))
    return (*keys, *([TOKEN_ADVANTAGES] if CREDIT_SCALE in request.batch.scalars else ()))


def stored_keys(batch: Batch, keys: Sequence[str]) -> dict[str, str]:
    """Return a dict that maps `keys` to the keys of their shards in the stores.

    The two differ for keys with a revision: proximal log-probs are stored under a key specific to the call that
    computed them, so that they cannot be confused with earlier values from other weights or another number of ranks.
    Raises RpcError(bad_request) if the batch lacks one of them.
    """
    stored = {key.partition(REVISION)[0]: key for key in batch.keys}
    for key in keys:
        if key not in stored:
            why = _RUN_FIRST.get(key, "no stage of this run makes it")
            raise RpcError(ErrorCode.BAD_REQUEST, f"the batch has no {key} (its keys: {', '.join(batch.keys)}): {why}")
    return {key: stored[key] for key in keys}


@dataclass(frozen=True)
class BatchTokens:
    """All sequences of a batch, ordered by task. `flat[key]` has the shape of the key's declaration, such as [T]."""

    flat: dict[str, Array]
    tokens_of_task: Array
    sequences_of_task: Array
    targets_of_task: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """The number of targets that were given; none for the tasks of a training run."""


def join(columns: Columns) -> BatchTokens:
    """Join the arrays of each key. The keys include `lengths`. Without tasks, the joined arrays have length 0."""
    lengths, keys = columns["lengths"], declared()
    return BatchTokens(
        flat={
            name: np.concatenate(arrays) if arrays else np.zeros((0, *keys[name].row), keys[name].dtype)
            for name, arrays in columns.items()
        },
        tokens_of_task=np.array([task.sum() for task in lengths], dtype=np.int64),
        sequences_of_task=np.array([len(task) for task in lengths], dtype=np.int64),
        targets_of_task=np.array([len(task) for task in columns.get(TARGETS, ())], dtype=np.int64),
    )


def check(handles: Sequence[TaskHandle], columns: Columns) -> None:
    """Refuse shards with wrong dtypes, inconsistent lengths or non-finite values before any of them is used.

    Raises RpcError(bad_data) naming the tasks and the first invalid shard.
    """
    wrong: list[str] = []
    cause = ""
    for index, handle in enumerate(handles):
        problem = _problem({key: arrays[index] for key, arrays in columns.items()}, handle.samples)
        if problem:
            wrong.append(handle.task_id)
            cause = cause or f"{handle.task_id}: {problem}"
    if wrong:
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"{cause}; shards of {len(wrong)} of {len(handles)} tasks refused, weights untouched",
            names=wrong,
        )


def _problem(task: dict[str, Array], samples: int) -> str:
    lengths, keys = task["lengths"], declared()
    tokens, targets = int(lengths.sum()), len(task.get(TARGETS, ()))
    sizes = {Per.TOKEN: tokens, Per.SEQUENCE: len(lengths), Per.SAMPLE: samples, Per.TARGET: targets}
    if "loss_mask" in task:
        sizes[Per.TRAINED] = int(np.count_nonzero(task["loss_mask"]))
    if TARGETS in task and (not targets or targets % tokens):
        return f"{TARGETS} has {targets} entries, which is no multiple of its {tokens} tokens"
    widths: dict[object, int] = {}  # those that only the topology knows
    for name, values in task.items():
        key = keys[name]
        if not key.width and widths.setdefault(key.width_of, values.shape[-1]) != values.shape[-1]:
            return f"{name} has {values.shape[-1]} columns, not {widths[key.width_of]} as another key of its stage"
    for name, values in task.items():
        key = keys[name]
        wanted = (sizes[key.per], *(key.row if key.width else (widths[key.width_of],)))
        if values.shape != wanted:
            of = f"{sizes[Per.SEQUENCE]} sequences of {sizes[Per.TOKEN]} tokens"
            return f"{name} has shape {list(values.shape)}, but its lengths say {list(wanted)} ({of})"
        if values.dtype != key.dtype:
            return f"{name} is {values.dtype}, but the key is declared as {key.dtype}"
    index = task.get("sample_index")
    if index is not None and ((index < 0) | (index >= samples)).any():
        return f"sample_index goes from {index.min()} to {index.max()}, but there are {samples} samples"
    for name, values in task.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = ~np.isfinite(values)
            first = f"{keys[name].per.name.lower()} {int(bad.argmax()) // (bad.size // len(bad))}"
            return f"{name} has values that are not finite: {int(bad.sum())}, the first at {first}"
    return ""


def leave_out(tokens: BatchTokens, left_out: Array) -> None:
    """Set the mask to 0 where `left_out`, bool [T], and drop what only trained tokens have there."""
    mask, keys = tokens.flat["loss_mask"], declared()
    stay = ~left_out[mask != 0]
    trained = {name: values[stay] for name, values in tokens.flat.items() if keys[name].per is Per.TRAINED}
    tokens.flat.update(trained, loss_mask=mask * ~left_out)


def with_ends(tokens: BatchTokens) -> tuple[dict[str, Array], Array]:
    """Return the arrays that a model reads, with one more token in each sequence, which is scored, and bool [T + S]:
    which tokens were added.

    The output at an added token depends only on the tokens before it.
    """
    lengths, ids = tokens.flat["lengths"].astype(np.int64), tokens.flat["token_ids"]
    after = np.cumsum(lengths)
    added = np.zeros(len(ids) + len(lengths), np.bool_)
    added[after + np.arange(len(lengths))] = True
    mask = np.insert(tokens.flat["loss_mask"], after, 1)
    flat = {"token_ids": np.insert(ids, after, 0), "lengths": tokens.flat["lengths"] + 1, "loss_mask": mask}
    return flat, added


def of_samples(tokens: BatchTokens, samples_of_task: Sequence[int], values: Array) -> Array:
    """Return [samples] from `values` [S], one for each sequence.

    Raises RpcError(bad_request) if a sample is not exactly one sequence.
    """
    size = sum(samples_of_task)
    of_sequence = _sample_of_sequence(tokens, samples_of_task, size)
    if not np.array_equal(np.sort(of_sequence), np.arange(size)):
        text = f"{len(values)} sequences for {size} samples: a value after the end needs one sequence per sample"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    made = np.zeros(size, values.dtype)
    made[of_sequence] = values
    return made


def spread(tokens: BatchTokens, samples_of_task: Sequence[int], values: Array) -> Array:
    """Return [T]: for each token, the entry of `values` [samples] for its sample, found through `sample_index`.

    Raises RpcError(bad_request) if the shards hold more samples than the batch states.
    """
    of_sequence = _sample_of_sequence(tokens, samples_of_task, len(values))
    return np.repeat(values[of_sequence], tokens.flat["lengths"])


def sample_kls(tokens: BatchTokens, samples_of_task: Sequence[int], ref: Array, estimator: str) -> Array:
    """Return float32 [samples]: `kl_sums` for the log-probs `ref` [T] of the reference."""
    return kl_sums(estimator, _numbered(tokens, samples_of_task), ref, sum(samples_of_task))


def sample_totals(tokens: BatchTokens, samples_of_task: Sequence[int], values: Array) -> Array:
    """Return float64 [samples]: the sum of `values` [T] over the trained tokens of each sample."""
    return sample_sums(_numbered(tokens, samples_of_task), values, sum(samples_of_task))


def _numbered(tokens: BatchTokens, samples_of_task: Sequence[int]) -> dict[str, Array]:
    """Return the arrays of the batch, with the number of each sequence's sample in the batch as `sample_index`."""
    return {**tokens.flat, "sample_index": _sample_of_sequence(tokens, samples_of_task, sum(samples_of_task))}


def sample_means(tokens: BatchTokens, samples_of_task: Sequence[int], values: Array) -> Array:
    """Return float64 [samples]: the mean of `values` [T] over the trained tokens of each sample, or 0 without any."""
    size, counted = sum(samples_of_task), tokens.flat["loss_mask"] != 0
    of_sequence = _sample_of_sequence(tokens, samples_of_task, size)
    sample = np.repeat(of_sequence, tokens.flat["lengths"])[counted]
    counts = np.bincount(sample, minlength=size)
    means: Array = np.bincount(sample, weights=values[counted], minlength=size) / np.maximum(counts, 1)
    return means


def _sample_of_sequence(tokens: BatchTokens, samples_of_task: Sequence[int], samples: int) -> Array:
    """Return int64 [S]: the position in the batch of each sequence's sample. Raises RpcError as `spread` does."""
    first = np.cumsum(samples_of_task) - np.asarray(samples_of_task)
    index = tokens.flat["sample_index"].astype(np.int64)
    allowed = np.repeat(np.asarray(samples_of_task), tokens.sequences_of_task)
    if not len(index) and not samples:
        return np.zeros(0, np.int64)
    if samples != sum(samples_of_task) or (index >= allowed).any() or (index < 0).any():
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{samples} values for {sum(samples_of_task)} samples, sample_index up to {index.max()}: the batch and "
            "its shards disagree",
        )
    of_sequence: Array = (np.repeat(first, tokens.sequences_of_task) + index).astype(np.int64)
    return of_sequence
