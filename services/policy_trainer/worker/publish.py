"""Puts a policy version into a store, with the log-probs that prove its loading. Must never see weights change."""

from __future__ import annotations

import numpy as np

from proto.ids import make_task_id
from proto.messages import Canary, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.dataplane.client import DataClient, TaskShards
from shared.drill import canary_tokens
from shared.stages import WEIGHTS
from shared.tensors_torch import to_numpy

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}
"""Largest absolute difference of a canary log-prob between trainer and engine, by the weights' dtype.

Four times (float32: eight times) the largest seen over 20 canaries of the quickstart's model between the trainer's
scoring and transformers' own prefill and token-by-token decode: 1.2e-5, 0.062, 0.0069.
"""
PUT_S = 300.0


class Canaries:
    """The fixed sequence of a run and the start-up drill's expected log-probs. Compute thread only."""

    def __init__(self, backend: TorchBackend, dtype: str, seed: int) -> None:
        """`seed`: the run's; computes the drill from the model directory's weights."""
        self._backend = backend
        self._tolerance = TOLERANCE[dtype]
        self._token_ids = canary_tokens(backend.vocab_size, seed)
        self._lengths = np.array([len(self._token_ids)], dtype=np.int32)
        self._mask = np.ones(len(self._token_ids), dtype=np.uint8)
        self._mask[0] = 0
        self.drill_seed = seed + 1
        self.drill = self._canary(backend.drill_logprobs(self._token_ids, self._lengths, self._mask, self.drill_seed))

    def current(self) -> Canary:
        """The canary of the weights as they are now."""
        return self._canary(self._backend.logprobs(self._token_ids, self._lengths, self._mask, 1.0))

    def _canary(self, logprobs: Array) -> Canary:
        return Canary(token_ids=self._token_ids, logprobs=logprobs[1:].astype(np.float32), tolerance=self._tolerance)


async def put_weights(
    data: DataClient,
    backend: TorchBackend,
    canaries: Canaries,
    canary: Canary,
    *,
    lineage: int,
    step: int,
    store: str,
    fence: int,
) -> WeightsRef:
    """One put of all weights under `weights/<lineage>/<step>`. Raises as `DataClient.put`."""
    shards = {name: to_numpy(tensor) for name, tensor in backend.weights().items()}
    task_id = make_task_id(WEIGHTS, lineage, step)
    (receipt,) = await data.put([TaskShards(task_id, fence, shards)], store=store, deadline_s=PUT_S)
    return WeightsRef(
        lineage=lineage,
        step=step,
        task_id=task_id,
        fence=fence,
        store=store,
        nbytes=receipt.nbytes,
        canary=canary,
        drill=canaries.drill,
        drill_seed=canaries.drill_seed,
    )
