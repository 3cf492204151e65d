"""Tests that scaling the loss by 1/N equals scaling its gradient by 1/N afterwards and that no intermediate value
overflows. This holds for both backends, in float32 and in bfloat16 with float32 masters, on one rank and on two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.megatron.backend import MegatronBackend
from shared.megatron.cpu_shims import megatron_device
from shared.ranks.layout import Layout, RankPlace
from tests.parity.gradient_cases import Case, back, cases
from tests.parity.groups import run_group
from tests.parity.megatron_models import alone, megatron, save
from tests.unit.policy_trainer.training import adamw

pytestmark = pytest.mark.timeout(300)

FAMILY = "qwen3-tied"
LIMITS = {"float32": 2e-6, "bfloat16": 2**-6}
"""Maximum difference as a fraction of the largest gradient. bfloat16 keeps 8 bits, and each layer of the backward pass
rounds."""
SURE = {"float32": 1.0, "bfloat16": 0.4}
"""Minimum fraction of weights whose gradient exceeds that difference, so that its sign is certain. In float32, all
weights do.
"""
LARGE = 1e4
TRAINING = {"clip_norm": 0.05, "lr": 1e-3}
MAX_TOKENS = 60
"""Maximum number of tokens in a micro-batch, small enough to give several micro-batches, so that accumulated gradients
are also scaled.
"""


def case() -> tuple[Case, int]:
    """Return a batch aggregated by token_mean, so that W = 1/N, together with N. N is not a power of two, because
    scaling by a power of two does not round."""
    made = next(cases())
    count = int(made.flat["loss_mask"].sum())
    assert count & (count - 1)
    return made, count


def gradients(backend: TorchBackend | MegatronBackend, factor: float) -> dict[str, torch.Tensor]:
    """Return the whole gradients of `factor` times the loss, on rank 0."""
    made, _ = case()
    back(backend, replace(made, weights=(made.weights * np.float32(factor)).astype(np.float32)))
    if isinstance(backend, MegatronBackend):
        with megatron_device():
            backend._trained.reduce()
            found = backend._trained.gradients()
    else:
        found = {name: backend._trained.whole(each.grad) for name, each in backend._trained.masters.items()}
    backend.drop_gradients()
    return {name: each.clone() for name, each in found.items()}


def everything(backend: TorchBackend | MegatronBackend) -> dict[str, torch.Tensor]:
    """Compute the gradients of the loss with W = 1/N, of its sum over tokens (W = 1), and of 10^4 times the loss; then
    make one update with the first gradient and one with the last.
    """
    _, count = case()
    out: dict[str, torch.Tensor] = {}
    for name, factor in (("loss", 1.0), ("sum", float(count)), ("large", LARGE)):
        out |= {f"{name}/{weight}": each for weight, each in gradients(backend, factor).items()}
    made, _ = case()
    for name, factor in (("step", 1.0), ("large-step", LARGE)):
        backend.restart()
        back(backend, replace(made, weights=(made.weights * np.float32(factor)).astype(np.float32)))
        out[f"norm/{name}"] = torch.tensor(backend.step(1, adamw(**TRAINING)), dtype=torch.float64)
        state = backend.state()
        masters = {key.removeprefix("master/"): each for key, each in state.optimizer.items() if "master/" in key}
        out |= {f"{name}/{weight}": each.clone() for weight, each in (masters or state.weights).items()}
    return out


def judged(found: dict[str, torch.Tensor], dtype: str) -> None:
    _, count = case()
    weights = [name.removeprefix("loss/") for name in found if name.startswith("loss/")]
    assert len(weights) > 10
    assert all(torch.isfinite(each).all() for each in found.values())
    scale = max(float(found[f"loss/{name}"].abs().max()) for name in weights)
    assert scale > 1e-4
    sure = 0
    for name in weights:
        loss = found[f"loss/{name}"]
        for other in (found[f"sum/{name}"] / count, found[f"large/{name}"] / LARGE):
            assert float((other - loss).abs().max()) <= LIMITS[dtype] * scale, name
        # Both gradients are clipped to the same norm and produce the same update to the (master) weights. Adam's first
        # update depends on little more than the sign of a gradient, which rounding to bfloat16 can flip where the
        # gradient is small.
        is_sure = loss.abs() > (LIMITS[dtype] * scale if dtype == "bfloat16" else -1.0)
        sure += int(is_sure.sum())
        moved = (found[f"large-step/{name}"] - found[f"step/{name}"]).abs() * is_sure
        assert float(moved.max()) <= 0.021 * TRAINING["lr"], name
    assert sure >= SURE[dtype] * sum(found[f"loss/{name}"].numel() for name in weights)
    norms = [float(found[f"norm/{each}"]) for each in ("step", "large-step")]
    assert norms[0] > TRAINING["clip_norm"]
    assert norms[1] == pytest.approx(norms[0] * LARGE, rel=1e-5 if dtype == "float32" else 2**-6)


def work(place: RankPlace, folder: Path) -> None:
    """Run the cases. On two ranks, torch divides samples and weights between them, and megatron divides tensors."""
    for dtype in LIMITS:
        model = folder.parent / "models" / f"{FAMILY}-{dtype}"
        shards = alone(FAMILY, model, Layout(2).place(place.rank), dtype=dtype)
        pieces = megatron(model, place, dtype=dtype, max_tokens=MAX_TOKENS)
        for name, backend in (("torch", shards), ("megatron", pieces)):
            found = everything(backend)
            if place.rank == 0:
                save_file(found, folder / f"{name}-{dtype}.safetensors")


def test_scaling_the_loss_equals_scaling_the_gradient_and_nothing_overflows(tmp_path: Path) -> None:
    for dtype in LIMITS:
        model = save(FAMILY, tmp_path / "models", dtype)
        judged(everything(alone(FAMILY, model, Layout(1).place(0), dtype=dtype)), dtype)
    run_group("tests.parity.test_scaling:work", Layout(2, tp=2), tmp_path / "ranks")
    for dtype in LIMITS:
        for name in ("torch", "megatron"):
            judged(load_file(tmp_path / "ranks" / f"{name}-{dtype}.safetensors"), dtype)
