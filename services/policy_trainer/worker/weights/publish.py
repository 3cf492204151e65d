"""Puts a policy version into a store, with the log-probs and digests that verify its loading. The weights must not
change in the meantime.

With `run.deterministic`, the last few versions are kept alongside the version in training: step s is sampled with
version s - 1 - staleness. A run that goes back to the checkpoint of step c after losing samples needs the versions from
c - staleness onwards, which later training does not reproduce. They are therefore kept here, saved in the checkpoint,
and published again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from proto.ids import make_task_id
from proto.messages import Canary, ErrorCode, Publish, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend import Backend, Sequences
from services.policy_trainer.worker.weights.channels import SideStream
from services.policy_trainer.worker.weights.drill import Drill, make_drill
from shared.colocation.shelf import LockedMemory
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.model.adapter import AdapterStart, begin_again
from shared.model.load import load_model
from shared.model.logprobs import vocabulary
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS
from shared.tensors_torch import to_numpy
from shared.weights.digests import digests_of
from shared.weights.drill import canary_error, canary_length, canary_tokens
from shared.weights.weight_set import WeightSet

TOLERANCE = 1e-4
"""Maximum absolute difference between the trainer's and the engine's log-prob of a canary token, for float32 weights.
It is eight times the largest difference, over 20 canaries of the quickstart's model, between the trainer's scoring and
transformers' own prefill and token-by-token decode."""
FLOOR = {"bfloat16": 0.02, "float16": 0.003}
"""Minimum tolerance, for the median difference, that an engine calibrates for 16-bit weights. It is eight (bfloat16)
or three (float16) times the median difference between the passes that `TOLERANCE` compares. Larger models show larger
differences, so engines calibrate."""
MEDIAN = 0.5
SIGNAL = 2.0
"""Minimum number of tolerances by which the drill moves the median log-prob. This bounds the calibrated tolerance."""
PUT_S = 300.0
NUMBER = "step"
"""Name of the only tensor of a version with which no engine samples."""
_CANARY = "canary"
_EARLIER_NAME = re.compile(r"(\d+)/(.+)")


class Canaries:
    """The fixed token sequence of a run, and the run's start-up drill. Use this object only on the compute thread."""

    def __init__(
        self,
        backend: Backend,
        model_dir: Path,
        dtype: str,
        seed: int,
        *,
        with_digests: bool,
        drill: Drill | None = None,
    ) -> None:
        """`seed` is the run's seed. If `with_digests` is true, every version is published with the digests of its
        weights. Rank 0 creates the drill from the weights in the model directory, unless it is given."""
        self._backend = backend
        self._text = _sequence(backend.vocab_size, seed, canary_length(backend.parameters, dtype))
        self._floor = FLOOR.get(dtype, 0.0)
        self._tolerance = TOLERANCE
        self._with_digests = with_digests
        self._stream = SideStream()
        self.drill: Canary | None = None
        self.drill_seed, self.drill_factors = seed + 1, list[float]()
        if backend.place.rank == 0:
            if drill is None:
                drill = first_drill(lambda: load_model(model_dir, dtype), dtype, seed, with_digests=with_digests)
            if self._floor:
                self._tolerance = canary_error(drill.true_logprobs, drill.logprobs, MEDIAN) / SIGNAL
            self.drill_factors = drill.factors
            self.drill = self._canary(_drill_text(backend.vocab_size, seed, dtype), drill.logprobs, drill.digests)

    def current(self) -> Canary:
        """Return the canary of the current weights. Every rank must call this; rank 0's result is used."""
        logprobs = self._backend.forward(self._text, 1.0)
        return self.of(logprobs[1:].astype(np.float32))

    def of(self, logprobs: Array) -> Canary:
        """Return the canary of a version with known log-probs (from the second token onwards)."""
        return self._canary(self._text, logprobs, [])

    def weight_set(self, weights: Mapping[str, Tensor]) -> WeightSet:
        """Return the record of a version, with digests unless engines use the arrays themselves.

        This may run on any thread. It reads all weights on the device where they are.
        """
        record = WeightSet.of(weights, self._backend.base)
        if not self._with_digests:
            return record
        with self._stream.after_training(next(iter(weights.values())).device):
            digests = digests_of(weights)
        return replace(record, digests=[digests[name] for name in sorted(digests)])

    def _canary(self, text: Sequences, logprobs: Array, digests: list[int]) -> Canary:
        return Canary(
            token_ids=text.token_ids,
            logprobs=logprobs,
            tolerance=self._tolerance,
            digests=digests,
            quantile=MEDIAN if self._floor else 1.0,
            floor=self._floor,
        )


def first_drill(fresh: Callable[[], nn.Module], dtype: str, seed: int, *, with_digests: bool) -> Drill:
    """Return the drill of a run with this seed. `fresh()` returns the model as `make_drill` needs it."""

    # The drill runs once and uses all tokens whatever the size of the model, because it must detect each parameter.
    def text(model: nn.Module) -> Sequences:
        return _drill_text(vocabulary(model), seed, dtype)

    return make_drill(fresh, text, seed + 1, tolerance=FLOOR.get(dtype, TOLERANCE), with_digests=with_digests)


def adapter_drill(model: nn.Module, start: AdapterStart, dtype: str, *, with_digests: bool) -> Drill:
    """Return the drill of a run that trains an adapter.

    It is made with `model` itself, because a second copy of the base might not fit into memory. `model` is whole, and
    has its first adapter before and after.
    """

    def fresh() -> nn.Module:
        begin_again(model, start, scaled=True)
        return model

    drill = first_drill(fresh, dtype, start.seed, with_digests=with_digests)
    begin_again(model, start, scaled=False)
    return drill


def _drill_text(vocab_size: int, seed: int, dtype: str) -> Sequences:
    return _sequence(vocab_size, seed, canary_length(0, dtype))


def _sequence(vocab_size: int, seed: int, length: int) -> Sequences:
    mask = np.ones(length, np.uint8)
    mask[0] = 0  # the first token has no prediction
    return Sequences(canary_tokens(vocab_size, seed, length), np.array([length], np.int32), mask)


@dataclass(frozen=True)
class EarlierVersion:
    """A policy version: its weights, on the CPU, and the log-probs with which their loading is
    verified."""

    weights: dict[str, Tensor]
    canary: Canary


class EarlierVersions:
    """The newest version and at most `depth` versions before it. Ranks other than 0 hold none."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._versions: dict[int, EarlierVersion] = {}

    def get(self, step: int) -> EarlierVersion | None:
        return self._versions.get(step)

    def record(self, step: int, weights: Mapping[str, Tensor], canary: Canary) -> None:
        """Store a copy of `weights` as version `step`.

        Drop versions from `step` onwards and those before `step - depth`.
        """
        if weights:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
            self._versions = {
                old: version for old, version in self._versions.items() if step - self.depth <= old < step
            }
            self._versions[step] = EarlierVersion(copies, canary)

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return the versions before `step` as tensors `<version>/<name>` and `<version>/canary`, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for old, version in self._versions.items():
            if old < step:
                tensors |= {f"{old}/{name}": tensor for name, tensor in version.weights.items()}
                tensors[f"{old}/{_CANARY}"] = torch.from_numpy(version.canary.logprobs.copy())
        return tensors

    def restore(self, tensors: dict[str, Tensor], canaries: Canaries | None) -> None:
        """Replace all versions with those in `tensors`, which the method `tensors` returned.

        A model without `canaries` is not published and has none.
        """
        if canaries is None:
            return
        weights: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _EARLIER_NAME.fullmatch(key)
            if match is not None:
                weights.setdefault(int(match[1]), {})[match[2]] = tensor
        self._versions = {
            step: EarlierVersion(named, canaries.of(to_numpy(named.pop(_CANARY))))
            for step, named in sorted(weights.items())
        }


class Staging:
    """The weights of a version in host memory, from which they are put into a store.

    Weights are copied from a GPU into page-locked memory, which is kept from version to version.

    Any thread may call it, but only one at a time. The arrays of a version are valid until the next call.
    """

    def __init__(self) -> None:
        self._locked: LockedMemory | None = None
        self._stream = SideStream()

    def arrays(self, weights: dict[str, Tensor]) -> dict[str, Array]:
        """Return the weights by name, bit for bit unchanged. Arrays of tensors in host memory share that memory."""
        on_device = {name: tensor for name, tensor in weights.items() if tensor.device.type != "cpu"}
        if not on_device:
            return {name: to_numpy(tensor) for name, tensor in weights.items()}
        sizes = [tensor.nbytes for tensor in on_device.values()]
        if self._locked is None or self._locked.sizes != sizes:
            self._locked = None  # frees the old memory first
            self._locked = LockedMemory(sizes)
        host = dict(weights)
        with self._stream.after_training(next(iter(on_device.values())).device):
            for (name, tensor), piece in zip(on_device.items(), self._locked.pieces, strict=True):
                host[name] = piece.view(tensor.dtype).view(tensor.shape)
                host[name].copy_(tensor, non_blocking=True)
        return {name: to_numpy(tensor) for name, tensor in host.items()}


async def put_weights(data: DataClient, weights: dict[str, Tensor], request: Publish, staging: Staging) -> Receipt:
    """Put all `weights` under `weights/<lineage>/<step>` on rank 0. Raises the errors of `DataClient.put`.

    The weights must not change until this returns, but may be read (for their canary). Fences are tried here, because a
    caller that tried them would need another request, by which time the weights may be those of the next step.
    """
    shards = await asyncio.to_thread(staging.arrays, weights)  # copies from a GPU take seconds for a large model
    task_id = make_task_id(WEIGHTS, request.lineage, request.step)
    fence, until = request.fence, time.monotonic() + PUT_S
    while True:
        try:
            (receipt,) = await data.put(
                [TaskShards(task_id, fence, shards)], store=request.store, deadline_s=max(0.0, until - time.monotonic())
            )
        except RpcError as error:
            # The store has collected an earlier put of this version: it was not announced, or no task needed it.
            # Every recovery may add such a put, so the number of tries is not limited. The store refuses such a
            # put before any bytes are written, unless a clear arrives during the write.
            if error.code != ErrorCode.COLLECTED:
                raise
            fence += 1
        else:
            return receipt


async def put_and_digested(
    put: asyncio.Future[Receipt], record: asyncio.Future[WeightSet]
) -> tuple[Receipt, WeightSet]:
    """Return the results of both, or raise the error of one, once neither reads the weights any longer."""
    await asyncio.gather(put, record, return_exceptions=True)
    return put.result(), record.result()


def number_ref(receipt: Receipt, request: Publish) -> WeightsRef:
    """Return the reference of a version with which no engine samples. Its canaries have no tokens."""
    nothing = Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), tolerance=0.0)
    return WeightsRef(
        lineage=request.lineage,
        step=request.step,
        task_id=receipt.task_id,
        fence=receipt.fence,
        store=request.store,
        nbytes=receipt.nbytes,
        canary=nothing,
        drill=nothing,
        drill_seed=0,
    )


def weights_ref(
    receipt: Receipt, canaries: Canaries, canary: Canary, record: WeightSet, request: Publish
) -> WeightsRef:
    """Return the reference by which engines find and verify the version that was put."""
    if canaries.drill is None:
        raise ValueError("weights are published by rank 0 only")
    return WeightsRef(
        lineage=request.lineage,
        step=request.step,
        task_id=receipt.task_id,
        fence=receipt.fence,
        store=request.store,
        nbytes=receipt.nbytes,
        canary=structs.replace(canary, digests=list(record.digests)),
        drill=canaries.drill,
        drill_seed=canaries.drill_seed,
        drill_factors=canaries.drill_factors,
        kind=record.kind,
        base="" if record.base is None else record.base.name,
        base_digests=[] if record.base is None else list(record.base.digests),
    )
