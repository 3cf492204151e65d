"""Puts a policy version into a store, with the log-probs and digests that verify its loading. The weights must not
change in the meantime."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from msgspec import structs
from torch import Tensor

from proto.ids import make_task_id
from proto.messages import Canary, ErrorCode, Publish, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend import Backend, Sequences
from services.policy_trainer.worker.weights.drill import make_drill
from services.policy_trainer.worker.weights.side_stream import SideStream
from services.policy_trainer.worker.weights.staging import Staging
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS
from shared.weights.digests import digests_of
from shared.weights.drill import canary_error, canary_length, canary_tokens

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


class Canaries:
    """The fixed token sequence of a run, and the run's start-up drill. Use this object only on the compute thread."""

    def __init__(self, backend: Backend, model_dir: Path, dtype: str, seed: int, *, with_digests: bool) -> None:
        """`seed` is the run's seed. Rank 0 creates the drill from the weights in the model directory. If `with_digests`
        is true, every version is published with the digests of its weights."""
        self._backend = backend
        self._text = _sequence(backend.vocab_size, seed, canary_length(backend.parameters, dtype))
        self._floor = FLOOR.get(dtype, 0.0)
        self._tolerance = TOLERANCE
        self._with_digests = with_digests
        self._stream = SideStream()
        self.drill: Canary | None = None
        self.drill_seed, self.drill_factors = seed + 1, list[float]()
        if backend.place.rank == 0:
            # The drill runs once and uses all tokens whatever the size of the model, because it must detect each
            # parameter.
            text = _sequence(backend.vocab_size, seed, canary_length(0, dtype))
            narrowest = self._floor or TOLERANCE
            drill = make_drill(model_dir, dtype, text, seed + 1, tolerance=narrowest, with_digests=with_digests)
            if self._floor:
                self._tolerance = canary_error(drill.true_logprobs, drill.logprobs, MEDIAN) / SIGNAL
            self.drill_factors = drill.factors
            self.drill = self._canary(text, drill.logprobs, drill.digests)

    def current(self) -> Canary:
        """Return the canary of the current weights. Every rank must call this; rank 0's result is used."""
        logprobs = self._backend.forward(self._text, 1.0)
        return self.of(logprobs[1:].astype(np.float32))

    def of(self, logprobs: Array) -> Canary:
        """Return the canary of a version with known log-probs (from the second token onwards)."""
        return self._canary(self._text, logprobs, [])

    def digests(self, weights: dict[str, Tensor]) -> list[int]:
        """Return the digests of a version in the order of the sorted names, or [] if engines use the arrays themselves.

        This may run on any thread. It reads all weights on the device where they are.
        """
        if not self._with_digests:
            return []
        with self._stream.after_training(next(iter(weights.values())).device):
            found = digests_of(weights)
        return [found[name] for name in sorted(found)]

    def _canary(self, text: Sequences, logprobs: Array, digests: list[int]) -> Canary:
        return Canary(
            token_ids=text.token_ids,
            logprobs=logprobs,
            tolerance=self._tolerance,
            digests=digests,
            quantile=MEDIAN if self._floor else 1.0,
            floor=self._floor,
        )


def _sequence(vocab_size: int, seed: int, length: int) -> Sequences:
    mask = np.ones(length, np.uint8)
    mask[0] = 0  # the first token has no prediction
    return Sequences(canary_tokens(vocab_size, seed, length), np.array([length], np.int32), mask)


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
    put: asyncio.Future[Receipt], digests: asyncio.Future[list[int]]
) -> tuple[Receipt, list[int]]:
    """Return the results of both, or raise the error of one, once neither reads the weights any longer."""
    await asyncio.gather(put, digests, return_exceptions=True)
    return put.result(), digests.result()


def weights_ref(
    receipt: Receipt, canaries: Canaries, canary: Canary, digests: list[int], request: Publish
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
        canary=structs.replace(canary, digests=digests),
        drill=canaries.drill,
        drill_seed=canaries.drill_seed,
        drill_factors=canaries.drill_factors,
    )
