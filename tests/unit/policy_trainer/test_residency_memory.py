"""Offloaded state leaves device memory and is restored bit for bit, and each call finds all parts that it uses on the
device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from proto import messages
from proto.messages import LossSpec, WorkerRequest
from proto.tensors import Array
from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.devices import NEEDS
from shared.colocation.devices import PARTS
from tests.unit.policy_trainer.training import accumulate, adamw, one_rank
from tests.unit.tiny_models import make_model, ragged

LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
IDS, LENGTHS, MASK = ragged()


def gradient(made: TorchBackend) -> None:
    flat: dict[str, Array] = {
        "token_ids": IDS,
        "lengths": LENGTHS,
        "loss_mask": MASK,
        "versions": np.zeros(len(IDS), np.int32),
        "rollout_logprobs": np.full(len(IDS), -2.0, np.float32),
    }
    advantages = np.random.default_rng(0).normal(size=len(IDS)).astype(np.float32)
    accumulate(made, LOSS, flat, advantages, np.full(len(IDS), 1 / MASK.sum(), np.float32))


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def everything(made: TorchBackend) -> dict[str, Tensor]:
    state = made.state()
    return copies(state.weights | state.optimizer)


def logprobs(made: TorchBackend) -> dict[str, Tensor]:
    return {"logprobs": torch.from_numpy(made.forward(Sequences(IDS, LENGTHS, MASK), 1.0))}


def updated(made: TorchBackend, folder: Path) -> dict[str, Tensor]:
    return {"norm": torch.tensor(made.step(2, adamw(2, lr=1e-2)))}


def exported(made: TorchBackend, folder: Path) -> dict[str, Tensor]:
    made.export(folder / "export")
    return load_file(folder / "export" / "model.safetensors")


def accumulated(made: TorchBackend, folder: Path) -> dict[str, Tensor]:
    gradient(made)
    return {}


def skipped(made: TorchBackend, folder: Path) -> dict[str, Tensor]:
    made.drop_gradients()
    return {}


CALLS: dict[type[WorkerRequest], Callable[[TorchBackend, Path], dict[str, Tensor]]] = {
    messages.Forward: lambda made, _: logprobs(made),
    messages.ForwardBackward: accumulated,
    messages.OptimStep: updated,
    messages.SkipUpdate: skipped,
    messages.Publish: lambda made, _: logprobs(made) | copies(made.weights()),
    messages.SaveCheckpoint: lambda made, _: everything(made),
    messages.SaveModel: exported,
}
"""What a rank's backend does in each call. The two calls that load the whole state are absent, because they move all
of it back to the device themselves."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_a_call_gives_the_same_bits_if_only_the_parts_that_it_needs_are_on_the_device(
    kind: type[WorkerRequest], dtype: str, tmp_path: Path
) -> None:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    found = []
    for away in (frozenset(), PARTS - NEEDS[kind]):
        made = one_rank(tmp_path / "model", dtype, max_tokens=4096)
        gradient(made)
        made.step(1, adamw(1, lr=1e-2))
        gradient(made)
        assert bool(made.shelves.offload(away)) == bool(away)
        answer = CALLS[kind](made, tmp_path)
        made.shelves.backload(PARTS)
        gradient(made)
        made.step(3, adamw(3, lr=1e-2))
        found.append(answer | {f"after {name}": each for name, each in everything(made).items()})
    first, second = found
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_falls_by_the_offloaded_bytes_and_the_next_update_is_the_same(tmp_path: Path, dtype: str) -> None:
    make_model("qwen3", head_dim=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=6).save_pretrained(
        tmp_path / "model"
    )
    found = []
    for moves in (False, True):
        made = one_rank(tmp_path / "model", dtype, max_tokens=4096)
        gradient(made)
        made.step(1, adamw(1, lr=1e-2))
        # Publishing shares weights with numpy in the same way.
        lent = made.weights()["model.norm.weight"].float().numpy()
        gradient(made)
        if moves:
            process = psutil.Process()
            before = process.memory_info().rss
            freed = made.shelves.offload(PARTS)
            fallen = before - process.memory_info().rss
            assert freed > 20e6
            assert fallen >= 0.8 * freed
            assert made.shelves.backload(PARTS) == freed
            assert not list((tmp_path / "model").rglob("*.bin"))
        made.step(2, adamw(2, lr=1e-2))
        assert np.isfinite(lent).all()
        found.append(everything(made))
    first, second = found
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
