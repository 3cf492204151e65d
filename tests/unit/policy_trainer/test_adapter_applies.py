"""Tests that training an adapter moves what the trainer and the embedded engine compute, and that an adapter which
cannot do so is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.weights import drill
from services.policy_trainer.worker.weights.publish import TOLERANCE, Canaries, first_drill
from services.rollout.engine import Prompt
from services.rollout.engines.transformers_engine import TransformersEngine
from shared.model.adapter import AdapterStart, adapt
from shared.model.load import load_model
from shared.ranks.layout import Layout
from shared.rpc.errors import BadInput
from shared.tensors_torch import to_numpy
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from tests.parity.gradient_cases import back, cases
from tests.unit.policy_trainer.training import adamw
from tests.unit.rollout.rollout_engine import MODEL, generate, sampling
from tests.unit.tiny_models import make_model

START = AdapterStart(Lora(rank=4, alpha=6.0), seed=3)
MOVED = 20 * TOLERANCE
"""How much a step must move some log-prob: far more than the tolerance within which trainer and engine agree."""


def test_a_step_moves_the_canary_in_the_trainer_and_in_the_engine(tmp_path: Path) -> None:
    """A wrapper that the passes of both ignored would leave both at the base, and they would agree."""
    options = BackendOptions(4096, threads=1, device="cpu", scratch=tmp_path, passes=FASTEST, adapter=START)
    backend = TorchBackend(MODEL, "float32", options, Layout(1).place(0))
    fresh = backend.published()
    of_drill = first_drill(
        lambda: adapt(load_model(MODEL, "float32"), START, scaled=True), "float32", 0, with_digests=False
    )
    canaries = Canaries(backend, MODEL, "float32", 0, with_digests=False, drill=of_drill)
    before = canaries.current()
    case = next(cases())
    case.flat["token_ids"] %= backend.vocab_size
    engine = TransformersEngine(
        model=MODEL, dtype="float32", threads=1, deterministic=False, passes=FASTEST, adapter=START
    )

    async def loaded(weights: dict[str, Tensor]) -> Array:
        """Return the engine's log-probs of the canary with a version."""
        await engine.set_weights({name: to_numpy(tensor.clone()) for name, tensor in weights.items()})
        return await engine.score(before.token_ids)

    def sampled() -> list[Any]:
        return [answer for group in generate(engine, [Prompt("train/0/0", [3, 4, 5])], sampling()) for answer in group]

    asyncio.run(engine.start())
    try:
        assert np.abs(asyncio.run(loaded(fresh)) - before.logprobs).max() <= TOLERANCE
        first = sampled()
        back(backend, case)
        backend.step(1, adamw(lr=0.05))
        after = canaries.current()
        assert np.abs(after.logprobs - before.logprobs).max() > MOVED
        assert np.abs(asyncio.run(loaded(backend.published())) - after.logprobs).max() <= TOLERANCE
        for answer, earlier in zip(sampled(), first, strict=True):
            assert np.abs(answer.logprobs[:1] - earlier.logprobs[:1]).max() > MOVED  # decoded by other passes
            ids = np.array([3, 4, 5, *answer.token_ids], np.int32)
            mask = np.r_[np.zeros(3, np.uint8), np.ones(len(answer.token_ids), np.uint8)]
            again = backend.forward(Sequences(ids, np.array([len(ids)]), mask), 1.0)[3:]
            assert np.abs(again - answer.logprobs).max() <= TOLERANCE
    finally:
        asyncio.run(engine.stop())


def make_drill(model: Any, *, limit_s: float = 30.0) -> None:
    """Make the drill of a model, whose backward pass is left out with a limit of 0."""
    with patch.object(drill, "BACKWARD_LIMIT_S", limit_s):
        first_drill(lambda: model, "float32", 0, with_digests=False)


def reads_weight(layer: nn.Module) -> None:
    """Make `layer`, an MLP, read the weight of its last part instead of calling it."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return torch.nn.functional.linear(inner, self.down_proj.weight)

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


@pytest.mark.parametrize("limit_s", [30.0, 0.0], ids=["small", "large"])
def test_a_layer_whose_weight_the_model_reads_itself_gets_no_adapter(limit_s: float) -> None:
    model = make_model("qwen3")
    reads_weight(model.model.layers[1].mlp)
    adapt(model, START, scaled=True)
    with pytest.raises(BadInput) as raised:
        make_drill(model, limit_s=limit_s)
    assert str(raised.value) == (
        "policy.lora.target_modules: the model does not call model.layers.1.mlp.down_proj as a layer, so its adapter "
        "has no effect; add it to exclude_modules"
    )
    excluded = Lora(rank=4, exclude_modules=("model.layers.1.mlp.down_proj",))
    other = make_model("qwen3")
    reads_weight(other.model.layers[1].mlp)
    make_drill(adapt(other, AdapterStart(excluded, seed=3), scaled=True), limit_s=limit_s)
    make_drill(adapt(make_model("qwen3"), START, scaled=True), limit_s=limit_s)
