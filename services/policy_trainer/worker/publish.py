"""Puts a policy version into a store, with the log-probs that prove its loading. Must never see weights change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proto.ids import make_task_id
from proto.messages import Canary, ErrorCode, Publish, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.backend import Backend, Sequences
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.drill import CANARY_TOKENS, canary_length, canary_tokens, perturb
from shared.model import few_rows
from shared.model.few_rows import FewRows
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.model.plain_decoder import PlainDecoder, is_plain
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS
from shared.tensors_torch import to_numpy, to_torch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}
"""Largest absolute difference of a canary log-prob between trainer and engine, by the weights' dtype.

Four times (float32: eight times) the largest seen over 20 canaries of the quickstart's model between the trainer's
scoring and transformers' own prefill and token-by-token decode: 1.2e-5, 0.062, 0.0069.
"""
PUT_S = 300.0
MAX_FENCES = 16
"""Lives of a driver that may have put one version and died before announcing it."""


class Canaries:
    """The fixed sequence of a run and the start-up drill's expected log-probs. Compute thread only."""

    def __init__(self, backend: Backend, model_dir: Path, dtype: str, seed: int) -> None:
        """`seed`: the run's. Rank 0 computes the drill from the model directory's weights, perturbed."""
        self._backend = backend
        self._tolerance = TOLERANCE[dtype]
        self._text = _sequence(backend.vocab_size, seed, canary_length(backend.parameters, dtype))
        self.drill_seed = seed + 1
        self.drill: Canary | None = None
        if backend.place.rank == 0:
            self.drill = self._drill(model_dir, dtype, _sequence(backend.vocab_size, seed, CANARY_TOKENS))

    def current(self) -> Canary:
        """The canary of the weights as they are now; every rank must call, the answer of rank 0 counts."""
        model = self._backend.model
        if is_plain(model):  # then this rank has all of it
            with torch.inference_mode():
                ids = torch.from_numpy(self._text.token_ids.astype(np.int64))
                return self.of(to_numpy(PlainDecoder(model, few_rows.linear).logprobs(ids)))
        with FewRows():
            logprobs = self._backend.forward(self._text, 1.0)
        return self.of(logprobs[1:].astype(np.float32))

    def of(self, logprobs: Array) -> Canary:
        """The canary of a version whose log-probs (from the second token on) are known."""
        return Canary(token_ids=self._text.token_ids, logprobs=logprobs, tolerance=self._tolerance)

    @torch.no_grad()
    def _drill(self, model_dir: Path, dtype: str, text: Sequences) -> Canary:
        """Of a second copy of the model, perturbed, made here and forgotten: the one in training stays as it is.

        All tokens, however large the model: the drill, which happens once, has to see each parameter by itself.
        """
        model = load_model(model_dir, dtype)
        for name, tensor in named_weights(model).items():
            tensor.copy_(to_torch(perturb(name, to_numpy(tensor), self.drill_seed)))
        logprobs, _ = token_logprobs(model, text.token_ids, text.lengths, text.loss_mask, 1.0, len(text.token_ids))
        expected = to_numpy(logprobs)[1:].astype(np.float32)
        return Canary(token_ids=text.token_ids, logprobs=expected, tolerance=self._tolerance)


def _sequence(vocab_size: int, seed: int, length: int) -> Sequences:
    mask = np.ones(length, np.uint8)
    mask[0] = 0  # nothing predicts the first token
    return Sequences(canary_tokens(vocab_size, seed, length), np.array([length], np.int32), mask)


async def put_weights(data: DataClient, weights: dict[str, Tensor], request: Publish) -> Receipt:
    """One put of all `weights` under `weights/<lineage>/<step>`, on rank 0. Raises as `DataClient.put`.

    They must not change until this returns; reading them (for their canary) may go on beside it. The fences are tried
    here and not by the caller: to publish once more it would have to ask again, and by then the weights may be those
    of the next step.
    """
    shards = {name: to_numpy(tensor) for name, tensor in weights.items()}
    task_id = make_task_id(WEIGHTS, request.lineage, request.step)
    fence = request.fence
    while True:
        try:
            (receipt,) = await data.put([TaskShards(task_id, fence, shards)], store=request.store, deadline_s=PUT_S)
        except RpcError as error:
            # an earlier life put this version and never announced it, so the store swept it up
            if error.code != ErrorCode.COLLECTED or fence + 1 >= request.fence + MAX_FENCES:
                raise
            fence += 1
        else:
            return receipt


def weights_ref(receipt: Receipt, canaries: Canaries, canary: Canary, request: Publish) -> WeightsRef:
    """What engines are told of the version that was put."""
    if canaries.drill is None:
        raise ValueError("weights are published by rank 0 only")
    return WeightsRef(
        lineage=request.lineage,
        step=request.step,
        task_id=receipt.task_id,
        fence=receipt.fence,
        store=request.store,
        nbytes=receipt.nbytes,
        canary=canary,
        drill=canaries.drill,
        drill_seed=canaries.drill_seed,
    )
