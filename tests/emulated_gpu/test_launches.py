"""Counts the kernels that training launches, and bounds them by those of a plain transformers loop. With small
micro-batches, launching is what takes a GPU's host the most time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from proto.messages import LossSpec
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.ranks.layout import Layout
from shared.topology.passes import FASTEST
from tests.emulated_gpu.kernels import launched
from tests.unit.policy_trainer.training import adamw

DEVICE = "cuda:0"
FEW, MANY = 2, 6
SEQUENCES, LENGTH = 4, 24
MORE = 1.1
"""Maximum number of launches per layer and micro-batch, relative to plain transformers'."""
LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)


def config(layers: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip


def counted(work: Callable[[], object]) -> Counter[str]:
    """Return the kernels that `work` launches, after a first time that prepares what is kept."""
    work()
    launched.clear()
    work()
    return launched.copy()


def ids_of(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(4, 512, count)


def ours(layers: int, folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute a micro-batch's gradient and an update."""
    model = folder / f"model-{layers}"
    AutoModelForCausalLM.from_config(config(layers), dtype=torch.bfloat16).save_pretrained(model)
    options = BackendOptions(max_tokens=4096, threads=1, device=DEVICE, scratch=folder, passes=FASTEST)
    backend = TorchBackend(model, "bfloat16", options, Layout(1).place(0))
    ids, lengths = ids_of(SEQUENCES * LENGTH), np.full(SEQUENCES, LENGTH, np.int32)
    mask = np.ones(len(ids), np.uint8)
    mask[::LENGTH] = 0
    flat = {"token_ids": ids, "lengths": lengths, "loss_mask": mask, "versions": np.zeros(len(ids), np.int32)}
    flat["rollout_logprobs"] = np.full(len(ids), -2.0, np.float32)
    loss = BatchLoss(LOSS, flat, np.ones(len(ids), np.float32), np.full(len(ids), 0.01, np.float32), DEVICE)
    sequences = Sequences(ids, lengths, mask)

    def gradient() -> object:
        return backend.forward_backward(sequences, 1.0, loss, entropy=loss.entropy)

    def update() -> object:
        gradient()
        launched.clear()
        return backend.step(1, adamw(lr=1e-5))

    return gradient, update


def plain(layers: int) -> Callable[[], object]:
    model = AutoModelForCausalLM.from_config(config(layers), dtype=torch.bfloat16).to(DEVICE)
    ids = torch.from_numpy(ids_of(SEQUENCES * LENGTH)).view(SEQUENCES, LENGTH).to(DEVICE)

    def gradient() -> object:
        return model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return gradient


def per_layer(of_layers: Callable[[int], Counter[str]]) -> Counter[str]:
    """Return the launches that a layer adds."""
    many, few = of_layers(MANY), of_layers(FEW)
    return Counter({name: (many[name] - few[name]) // (MANY - FEW) for name in many if many[name] != few[name]})


def test_a_layer_launches_hardly_more_kernels_than_with_plain_transformers(tmp_path: Path) -> None:
    mine = per_layer(lambda layers: counted(ours(layers, tmp_path)[0]))
    theirs = per_layer(lambda layers: counted(plain(layers)))
    print(f"ours {mine.total()}: {mine}\nplain {theirs.total()}: {theirs}")
    assert mine.total() <= MORE * theirs.total(), f"{mine - theirs} more, {theirs - mine} fewer"


def test_an_update_launches_as_many_kernels_for_any_number_of_layers(tmp_path: Path) -> None:
    few, many = (counted(ours(layers, tmp_path)[1]) for layers in (FEW, MANY))
    print(f"an update: {few.total()}: {few}")
    assert few == many


@pytest.fixture(autouse=True)
def attention_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as a process on a GPU does."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
