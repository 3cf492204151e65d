"""Checks gradients and losses of the megatron backend: every split gives the same values as the torch backend with one
process and one micro-batch. The same holds for norms, updates and optimizer states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from services.policy_trainer.worker.megatron.backend import MegatronBackend
from shared.megatron.cpu_shims import megatron_device
from shared.ranks.layout import Layout, RankPlace
from tests.parity.gradient_cases import RUNS, Case, cases, nothing_trained
from tests.parity.groups import run_group, sums_of
from tests.parity.megatron_models import alone, megatron, save
from tests.unit.policy_trainer.training import adamw

pytestmark = pytest.mark.timeout(300)

LIMITS = {"float64": 1e-12, "float32": 1e-5}
LAYOUTS = {
    "dp2": Layout(2),
    "tp2": Layout(2, tp=2),
    "pp2": Layout(2, pp=2),
    "cp2": Layout(2, cp=2),
    "dp2xcp2": Layout(4, cp=2),
}
PRODUCTS = {"dp2xtp2": Layout(4, tp=2), "dp2xpp2": Layout(4, pp=2), "tp2xpp2": Layout(4, tp=2, pp=2)}
FAMILY = "qwen3-tied"
ALONE = Layout(1).place(0)
# With a smaller eps, AdamW's first updates have full size even where a gradient is only a rounding error.
TRAINING = {"clip_norm": 0.05, "weight_decay": 0.1, "warmup_steps": 2, "lr": 3e-3, "eps": 1e-5}


def back(backend: MegatronBackend | TorchBackend, case: Case) -> dict[str, float]:
    place = backend.place
    flat, advantages, weights = case.of(place.dp_rank, place.layout.dp)
    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    loss = BatchLoss(case.spec, flat, advantages, weights, "cpu")
    return backend.forward_backward(sequences, case.spec.temperature, loss, entropy=loss.entropy)


def work(place: RankPlace, folder: Path) -> None:
    """Run every case in both precisions, whole and in small micro-batches, and then three updates."""
    models, mine = folder.parent / "models", folder / f"rank-{place.rank}"
    for dtype, max_tokens in RUNS:
        recompute = "layers" if max_tokens == 30 else "none"
        backend = megatron(models / f"{FAMILY}-{dtype}", place, dtype=dtype, max_tokens=max_tokens, recompute=recompute)
        for case in cases():
            sums = back(backend, case)
            with megatron_device():
                backend._trained.reduce()
                out = {f"grad/{name}": each for name, each in backend._trained.gradients().items()}
            backend.drop_gradients()
            out |= {f"sum/{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
            save_file(out, mine / f"{dtype}-{max_tokens}-{case.name}.safetensors")
    for case in nothing_trained():
        before = backend.state().weights
        back(backend, case)
        assert backend.step(1, adamw()) == 0
        assert all(torch.equal(value, before[name]) for name, value in backend.state().weights.items())
    backend = megatron(models / f"{FAMILY}-float32", place, max_tokens=60)
    norms = []
    for step, case in enumerate(list(cases())[:3], start=1):
        back(backend, case)
        norms.append(backend.step(step, adamw(step, **TRAINING)))
    state = backend.state()
    again = megatron(models / f"{FAMILY}-float32", place, max_tokens=60)
    given = (
        load_file(folder.parent / "torch-weights.safetensors"),
        load_file(folder.parent / "torch-optimizer.safetensors"),
    )
    again.load_state(type(state)(*given))
    returned = again.state()
    out = {f"weights/{name}": each for name, each in state.weights.items()}
    out |= {f"optimizer/{name}": each for name, each in state.optimizer.items()}
    out |= {f"returned-weights/{name}": each for name, each in returned.weights.items()}
    out |= {f"returned-optimizer/{name}": each for name, each in returned.optimizer.items()}
    save_file(out | {"norms": torch.tensor(norms, dtype=torch.float64)}, mine / "trained.safetensors")


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.long) for each in PRODUCTS)])
def test_gradients_updates_and_states_equal_those_of_one_torch_process(name: str, tmp_path: Path) -> None:
    layout = (LAYOUTS | PRODUCTS)[name]
    models = {dtype: save(FAMILY, tmp_path / "models", dtype) for dtype in LIMITS}
    trained = alone(FAMILY, models["float32"], ALONE)
    norms = []
    for step, case in enumerate(list(cases())[:3], start=1):
        back(trained, case)
        norms.append(trained.step(step, adamw(step, **TRAINING)))
    state = trained.state()
    save_file(state.weights, tmp_path / "torch-weights.safetensors")
    save_file(state.optimizer, tmp_path / "torch-optimizer.safetensors")

    run_group("tests.parity.test_megatron_gradients:work", layout, tmp_path / name)
    ranks = [tmp_path / name / f"rank-{rank}" for rank in range(layout.world_size)]
    for dtype, limit in LIMITS.items():
        _gradients_equal(dtype, limit, models[dtype], ranks)

    found = [load_file(rank / "trained.safetensors") for rank in ranks]
    for each in found:
        np.testing.assert_allclose(each["norms"].numpy(), norms, rtol=1e-5)
    assert min(norms) > TRAINING["clip_norm"]
    first = found[0]
    for weight, value in state.weights.items():
        assert float((first[f"weights/{weight}"] - value).abs().max()) <= 1e-5, weight
        assert torch.equal(first[f"returned-weights/{weight}"], value)
    for slot, value in state.optimizer.items():
        scale = float(value.abs().max())
        assert float((first[f"optimizer/{slot}"] - value).abs().max()) <= 1e-4 * scale, slot
        assert torch.equal(first[f"returned-optimizer/{slot}"], value), slot
    assert {key for key in first if key.startswith("optimizer/")} == {f"optimizer/{slot}" for slot in state.optimizer}


def _gradients_equal(dtype: str, limit: float, model: Path, ranks: list[Path]) -> None:
    plain = alone(FAMILY, model, ALONE, dtype=dtype)
    for case in cases():
        sums = back(plain, case)
        expected = {name: master.grad.clone() for name, master in plain._trained.masters.items()}
        plain.drop_gradients()
        scale = max(float(value.abs().max()) for value in expected.values())
        assert scale > 1e-4
        for max_tokens in (size for precision, size in RUNS if precision == dtype):
            label = f"{dtype}-{max_tokens}-{case.name}"
            parts = [load_file(rank / f"{label}.safetensors") for rank in ranks]
            assert {key for key in parts[0] if key.startswith("grad/")} == {f"grad/{weight}" for weight in expected}
            for weight, value in expected.items():
                error = float((parts[0][f"grad/{weight}"] - value).abs().max()) / scale
                assert error <= limit, f"{label} {weight}: {error:.2e}"
            assert sums_of(parts) == pytest.approx(sums, rel=1e-5, abs=1e-6), label
