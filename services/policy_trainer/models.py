"""The models of clients on one group of workers: the calls that a server makes, and the shards that carry their data.

Many models share the workers. Each is an adapter with an optimizer, a gradient, errors and snapshots of its own, and
its calls run in the order in which they were made. Which model's calls come next is the server's decision.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from proto import messages
from proto.ids import REVISION, make_task_id
from proto.messages import AdamW, AdapterSpec, BatchMeta, BatchPart, LossSpec, TaskHandle, WeightsRef
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkerDispatch
from shared.batch import Batch
from shared.dataplane.client import DataClient, TaskShards
from shared.stages import API, GIVEN, GIVEN_ANCHOR, GIVEN_LOGPROBS, GIVEN_LOSSES, loss_keys

FENCE = 1
"""The fence of the data of clients, which are put only once."""
PUT_S = 60.0
CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_OPTIONS: Mapping[str, Mapping[str, float | None]] = MappingProxyType(
    {name: {CLIP_LOW: 0.8, CLIP_HIGH: 1.2} if name in ("ppo", "cispo") else {} for name in GIVEN_LOSSES}
    | {"dro": {BETA: None}}
)
"""The options of each loss of clients with their defaults. None: there is no default."""
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "gspo": "pass ppo, or compute it in the client with forward_backward_custom",
        "stable_reinforce": "pass loss_fn=importance_sampling",
        "custom": "call forward_backward_custom, which computes the loss in the client",
    }
)


class Models:
    """Calls to the models of clients, numbered when they are made. The caller must await their results.

    Any call may raise these errors:

    - WorkersLost: a worker died, hangs, or waited for a store for too long. No result of any call that is open is
      known. The caller takes over again (`take_over`), opens every model from its snapshot (`resume`), and repeats the
      calls that came after the snapshot, in order. Their results have the same bits.
    - RpcError(conflict): another driver has taken over.
    - RpcError of any other code: this call failed, and no call of another model is affected. bad_data and bad_request
      are the client's fault, and the message is for it.
    """

    def __init__(self, workers: WorkerDispatch) -> None:
        self._workers = workers
        self._turn, self._fence = 0, 0
        """Fence of published versions. It tells the bits of steps apart that are repeated after a loss."""

    async def take_over(self, turn: int | None = None) -> dict[int, int]:
        """Take control of the workers. Return the step of the newest snapshot that all ranks hold, by model.

        No model is open afterwards. For `turn`, see `WorkerDispatch.take_over`.
        """
        turn = self._turn if turn is None else turn
        self._fence = self._fence + 1 if turn == self._turn else max(1, turn << 12)
        self._turn, newest = turn, dict[int, int]()
        for held in (await self._workers.take_over(turn)).snapshots:
            if held.model:
                newest[held.model] = max(held.step, newest.get(held.model, 0))
        return newest

    # ---- opening and closing

    def open_model(self, model: int, adapter: AdapterSpec) -> Awaitable[int]:
        """Give the model a new adapter, at step 0. Return the step."""
        return self._open(messages.OpenModel(driver=0, order=0, model=model, adapter=adapter, step=0))

    def load(
        self, model: int, adapter: AdapterSpec, folder: Path, *, with_optimizer: bool, step: int = -1
    ) -> Awaitable[int]:
        """Load what `save` has written, and drop the gradient. Return the step at which the model then is.

        It is `step`, or -1: the one after the current step. Use `step` for a model that is not open, such as one that
        was parked: the step at which it was saved, so that its versions have other numbers than the earlier ones.
        """
        return self._open(
            messages.OpenModel(
                driver=0,
                order=0,
                model=model,
                adapter=adapter,
                folder=str(folder),
                with_optimizer=with_optimizer,
                step=step,
            )
        )

    def resume(self, model: int, adapter: AdapterSpec, step: int, *, failed: str = "") -> Awaitable[int]:
        """Open the model with the snapshot of `step`. Return the step.

        `failed` is the reason if a forward_backward has failed since the snapshot. The next optim_step then fails as
        well.
        """
        return self._open(
            messages.OpenModel(driver=0, order=0, model=model, adapter=adapter, snapshot=True, step=step, failed=failed)
        )

    def _open(self, request: messages.OpenModel) -> Awaitable[int]:
        async def opened(answer: Awaitable[messages.WorkerReady]) -> int:
            return (await answer).step

        return asyncio.ensure_future(opened(self._workers.call(request, messages.WorkerReady)))

    def close_model(self, model: int) -> Awaitable[messages.Ack]:
        """Forget the model and its snapshots. A model that is not open is no error."""
        return self._workers.call(messages.CloseModel(driver=0, order=0, model=model), messages.Ack)

    # ---- training

    def forward_backward(
        self, model: int, batch: Batch, loss: LossSpec, *, forward_only: bool = False, repeated: bool = False
    ) -> Awaitable[messages.ForwardBackwardDone]:
        """Add the gradient of the loss, summed over the targets of all data in `batch` (`put_data`).

        The answer has the `sums` of metrics, `loss` and `tokens` among them, and in `meta` the log-probs of the
        targets, in the order of `batch` (`logprobs_of`). With `forward_only`, the same numbers are computed, but no
        gradient. Pass `repeated` to repeat a call whose answer is known: the gradient is the same, `meta` is None, and
        the log-probs that the first answer names remain. Without it, the stores would drop them.

        If the call fails, the gradient that has been accumulated is dropped, and the next `optim_step` of the model
        fails. With `forward_only`, a failed call changes nothing.
        """
        request = messages.ForwardBackwardModel(
            driver=0,
            order=0,
            model=model,
            batch=batch.meta,
            loss=loss,
            forward_only=forward_only,
            repeated=repeated,
        )
        return self._workers.call(request, messages.ForwardBackwardDone)

    def optim_step(self, model: int, optimizer: AdamW) -> Awaitable[messages.OptimStepDone]:
        """Clip and apply the accumulated gradient, and keep a snapshot on every rank. Without a gradient, no weight
        changes.

        The answer has the norm of the gradient before clipping, and the step at which the model then is. Raises
        RpcError(bad_data), with the weights and the moments unchanged and without a gradient from then on, if a
        forward_backward has failed since the last optim_step, or the gradient is not finite; and RpcError(bad_request),
        with the gradient still there, for a number out of range.
        """
        request = messages.OptimStepModel(driver=0, order=0, model=model, optimizer=optimizer)
        return self._workers.call(request, messages.OptimStepDone)

    # ---- weights

    def publish(self, model: int, *, store: str) -> Awaitable[WeightsRef]:
        """Put the adapter, or all weights, into `store` as the version (model, its step). Return its reference.

        The shards have the task id `weights/<model>/<step>`, which the caller holds (`SchedulerCalls.hold`) first. The
        tensors are those of whole slots, padded with zeros, and B is multiplied by its scale. The same version may be
        published again.
        """
        request = messages.PublishModel(driver=0, order=0, model=model, store=store, fence=self._fence)
        return self._workers.published(request)

    def save(self, model: int, folder: Path, *, with_optimizer: bool) -> Awaitable[messages.Saved]:
        """Save the adapter in `folder` in peft's format, with its rank and its layers only, or all weights in that of
        transformers, and the moments if asked for. The gradient is not saved. Later calls may run before the answer."""
        request = messages.SaveState(
            driver=0, order=0, model=model, path=str(folder.absolute()), with_optimizer=with_optimizer
        )
        return self._workers.call(request, messages.Saved)


# ---------------------------------------------------------------------------------------------- losses and optimizers


def client_loss(name: str, options: Mapping[str, float], temperature: float = 1.0) -> LossSpec:
    """Return the loss `name` of clients with its options, as `forward_backward` of Tinker's API has them. Thresholds
    are ratios.

    Raises ValueError, with one line for the client, for an unknown loss or option, or a number out of range.
    """
    known = _OPTIONS.get(name)
    if known is None:
        remedy = _INSTEAD.get(name, f"use {', '.join(GIVEN_LOSSES)}")
        raise ValueError(f"loss_fn {name[:80]!r} is not supported here; {remedy}")
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(
            f"loss_fn_config: {name} has no option {unknown[0][:80]!r}; it has {', '.join(known) or 'none'}"
        )
    values = {key: options.get(key, default) for key, default in known.items()}
    for key, value in values.items():
        if value is None or not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_fn_config: {key} of {name} is {value}; it must be a number, 0 or more")
    low, high = values.get(CLIP_LOW) or 0.0, values.get(CLIP_HIGH) or 0.0
    if low > high:
        raise ValueError(f"loss_fn_config: {CLIP_LOW} {low:g} is above {CLIP_HIGH} {high:g}; they are ratios around 1")
    return LossSpec(
        name=name,
        clip_low=low,
        clip_high=high,
        anchor=GIVEN_ANCHOR,
        temperature=temperature,
        beta=values.get(BETA) or 0.0,
    )


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Datum:
    """One sequence of a client with its targets. All arrays but `token_ids` follow the shape of `targets`, [N] or, for
    cross_entropy, [N, K]: K targets for each of the N tokens, which predict what comes after the token."""

    token_ids: Array
    targets: Array
    weights: Array | None = None
    """For cross_entropy. None: 1 for each target."""
    advantages: Array | None = None
    """For all other losses."""
    logprobs: Array | None = None
    """For all other losses: the log-probs with which the targets were sampled."""


def shards_of(datum: Datum, loss: LossSpec) -> dict[str, Array]:
    """Return the shards of a datum for `loss`, by key. Raises ValueError with one line that names the array."""
    size, shape = len(datum.token_ids), datum.targets.shape
    if datum.token_ids.ndim != 1 or not size:
        raise ValueError(f"model_input has shape {list(datum.token_ids.shape)}, but must be a list of tokens")
    if len(shape) not in (1, 2) or shape[0] != size or 0 in shape:
        raise ValueError(f"target_tokens has shape {list(shape)}, but {size} tokens need [{size}] or [{size}, K]")
    ones = np.ones(shape, np.float32) if datum.weights is None else datum.weights
    arrays: dict[str, Array | None] = {
        "token_weights": ones,
        "token_advantages": datum.advantages,
        "anchor_logprobs": datum.logprobs,
    }
    if loss.name != "cross_entropy" and len(shape) != 1:
        raise ValueError(f"target_tokens has shape {list(shape)}, but {loss.name} has one target per token, [{size}]")
    shards = {
        "token_ids": _int32(datum.token_ids, "model_input"),
        "lengths": np.array([size], np.int32),
        "target_tokens": _int32(datum.targets, "target_tokens").reshape(-1),
    }
    for key in loss_keys(loss):
        if key.name in shards:
            continue
        name, array = _FIELDS[key.name], arrays[key.name]
        if array is None:
            raise ValueError(f"loss_fn_inputs has no {name}, which {loss.name} needs")
        if array.shape != shape:
            raise ValueError(f"{name} has shape {list(array.shape)}, but target_tokens has {list(shape)}")
        shards[key.name] = np.ascontiguousarray(array, np.float32).reshape(-1)
        if not np.isfinite(shards[key.name]).all():
            raise ValueError(f"{name} has values that are not finite numbers of float32")
    return shards


_FIELDS: Mapping[str, str] = MappingProxyType(
    {"token_weights": "weights", "token_advantages": "advantages", "anchor_logprobs": "logprobs"}
)
"""Clients' names of these keys."""


def _int32(values: Array, name: str) -> Array:
    if values.dtype.kind not in "iu" or (values < 0).any() or (values > np.iinfo(np.int32).max).any():
        raise ValueError(f"{name} must be token ids, which are integers of 0 or more")
    return np.ascontiguousarray(values, np.int32)


async def put_data(
    data: DataClient, store: str, model: int, first: int, shards: Sequence[Mapping[str, Array]]
) -> Batch:
    """Put the `shards_of` data into `store` as the tasks `api/<model>/<first>` and following, and return them as a
    batch, which can be journaled (`Batch.meta`). The same put again changes nothing.

    The caller holds the tasks (`SchedulerCalls.hold`) first. Raises the errors of `DataClient.put`.
    """
    names = [make_task_id(API, model, first + index) for index in range(len(shards))]
    tasks = [TaskShards(name, FENCE, dict(arrays)) for name, arrays in zip(names, shards, strict=True)]
    if tasks:
        await data.put(tasks, store=store, deadline_s=PUT_S)
    handles = [
        TaskHandle(name, FENCE, 1, len(arrays["token_ids"]), sum(array.nbytes for array in arrays.values()), [0])
        for name, arrays in zip(names, shards, strict=True)
    ]
    keys = list(shards[0]) if shards else []
    return Batch(BatchMeta(tasks=handles, parts=[BatchPart(GIVEN.name, keys)], stores=[store]))


async def logprobs_of(data: DataClient, done: BatchMeta) -> list[Array]:
    """Return the log-probs of the targets of each task, float32 [N K], from the answer of `forward_backward`.

    Raises the errors of `Batch.fetch`.
    """
    batch = Batch(done, data)
    (key,) = (key for key in batch.keys if key.partition(REVISION)[0] == GIVEN_LOGPROBS)
    return (await batch.fetch([key]))[key]
