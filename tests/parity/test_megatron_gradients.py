"""Checks gradients and losses of the megatron backend: every split gives the same values as the torch backend with one
process and one micro-batch. The same holds for norms, updates and optimizer states."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policy_trainer.worker.training_state import TrainingState
from shared.megatron.cpu_shims import megatron_device
from shared.ranks.layout import Layout, RankPlace
from shared.topology.services import Recompute
from tests.parity.gradient_cases import RUNS, back, cases_of, forward, nothing_trained, outputs_of
from tests.parity.groups import run_group, sums_of
from tests.parity.megatron_models import MIXTURES, alone, head_of, hf_model, megatron, save
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
EXPERT_LAYOUTS = {"ep2": Layout(2, ep=2), "ep2xdp2": Layout(4, ep=2), "ep2xpp2": Layout(4, pp=2, ep=2)}
MODELS = ("qwen3-tied", "qwen3-critic")
ALONE = Layout(1).place(0)
# With a smaller eps, AdamW's first updates have full size even where a gradient is only a rounding error.
TRAINING = {"clip_norm": 0.05, "weight_decay": 0.1, "warmup_steps": 2, "lr": 3e-3, "eps": 1e-5}


def work(place: RankPlace, folder: Path) -> None:
    for family in sorted({model.name.rpartition("-")[0] for model in (folder.parent / "models").iterdir()}):
        work_on(family, place, folder)


def work_on(family: str, place: RankPlace, folder: Path) -> None:
    """Run every case in both precisions, whole and in small micro-batches, and then three updates."""
    models, mine, head = folder.parent / "models", folder / f"rank-{place.rank}", head_of(family)
    for dtype, max_tokens in RUNS:
        recompute: Recompute = "layers" if max_tokens == 30 else "none"
        backend = megatron(models / f"{family}-{dtype}", place, dtype=dtype, max_tokens=max_tokens, recompute=recompute)
        for case in cases_of(head):
            sums = back(backend, case, head)
            with megatron_device():
                backend._trained.reduce()
                out = {f"grad/{name}": each for name, each in backend._trained.gradients().items()}
            backend.drop_gradients()
            out |= {f"sum/{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
            save_file(out, mine / f"{family}-{dtype}-{max_tokens}-{case.name}.safetensors")
    for case in nothing_trained():
        before = backend.state().weights
        back(backend, case, head)
        assert backend.step(1, adamw()) == 0
        assert all(torch.equal(value, before[name]) for name, value in backend.state().weights.items())
    backend = megatron(models / f"{family}-float32", place, max_tokens=60)
    norms = []
    for step, case in enumerate(cases_of(head)[:3], start=1):
        back(backend, case, head)
        norms.append(backend.step(step, adamw(step, **TRAINING)))
    state = backend.state()
    again = megatron(models / f"{family}-float32", place, max_tokens=60)
    given = (
        load_file(folder.parent / f"{family}-weights.safetensors"),
        load_file(folder.parent / f"{family}-optimizer.safetensors"),
    )
    again.load_state(type(state)(*given))
    returned = again.state()
    own = {name: each.clone() for name, each in backend.own_state().items()}
    again.load_own_state(own)
    assert all(torch.equal(each, own[name]) for name, each in again.own_state().items())
    out = {f"weights/{name}": each for name, each in state.weights.items()}
    out |= {f"optimizer/{name}": each for name, each in state.optimizer.items()}
    out |= {f"returned-weights/{name}": each for name, each in returned.weights.items()}
    out |= {f"returned-optimizer/{name}": each for name, each in returned.optimizer.items()}
    out["norms"] = torch.tensor(norms, dtype=torch.float64)
    out["outputs"] = torch.from_numpy(forward(again, cases_of(head)[0], head))
    save_file(out, mine / f"{family}.safetensors")


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.long) for each in PRODUCTS)])
def test_gradients_updates_and_states_equal_those_of_one_torch_process(name: str, tmp_path: Path) -> None:
    _equal((LAYOUTS | PRODUCTS)[name], MODELS, tmp_path)


@pytest.mark.parametrize(
    "name", ["ep2", *(pytest.param(each, marks=pytest.mark.long) for each in ("ep2xdp2", "ep2xpp2"))]
)
def test_expert_parallel_gradients_updates_and_states_equal_those_of_one_torch_process(
    name: str, tmp_path: Path
) -> None:
    for family in MIXTURES:
        assert _smallest_margin(family) > 1e-5, "a token is close to a tie between experts; choose another seed"
    _equal(EXPERT_LAYOUTS[name], tuple(MIXTURES), tmp_path)


def _smallest_margin(family: str) -> float:
    """Return the smallest difference between the probabilities of the last expert that a token uses and of the next."""
    model, margins = hf_model(family, "float64"), []

    def keep(router: Any, given: Any, made: tuple[torch.Tensor, ...]) -> None:
        likely = made[0].detach().softmax(-1).topk(router.top_k + 1).values
        margins.append(float((likely[:, -2] - likely[:, -1]).min()))

    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(keep)
    for case in cases_of("language"):
        for ids in np.split(case.flat["token_ids"], np.cumsum(case.flat["lengths"])[:-1]):
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    return min(margins)


def _equal(layout: Layout, models: tuple[str, ...], tmp_path: Path) -> None:
    for family, dtype in itertools.product(models, LIMITS):
        save(family, tmp_path / "models", dtype)
    trained = {family: _trained(family, tmp_path) for family in models}
    run_group("tests.parity.test_megatron_gradients:work", layout, tmp_path / "ranks")
    ranks = [tmp_path / "ranks" / f"rank-{rank}" for rank in range(layout.world_size)]
    for family in models:
        for dtype, limit in LIMITS.items():
            _gradients_equal(family, dtype, limit, tmp_path / "models" / f"{family}-{dtype}", ranks)
        norms, state, outputs = trained[family]
        found = [load_file(rank / f"{family}.safetensors") for rank in ranks]
        _updates_equal(norms, state, found)
        for rank, each in enumerate(found):
            mine = outputs_of(layout.place(rank), cases_of(head_of(family))[0], outputs)
            assert np.abs(each["outputs"].numpy() - mine).max() <= 1e-5


def _trained(family: str, folder: Path) -> tuple[list[float], TrainingState, np.ndarray]:
    """Return the norms of three updates of the torch backend, its state, and the outputs of a forward pass. Save the
    state."""
    head, norms = head_of(family), []
    backend = alone(family, folder / "models" / f"{family}-float32", ALONE)
    for step, case in enumerate(cases_of(head)[:3], start=1):
        back(backend, case, head)
        norms.append(backend.step(step, adamw(step, **TRAINING)))
    state = backend.state()
    save_file(state.weights, folder / f"{family}-weights.safetensors")
    save_file(state.optimizer, folder / f"{family}-optimizer.safetensors")
    return norms, state, forward(backend, cases_of(head)[0], head)


def _updates_equal(norms: list[float], state: TrainingState, found: list[dict[str, torch.Tensor]]) -> None:
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


def _gradients_equal(family: str, dtype: str, limit: float, model: Path, ranks: list[Path]) -> None:
    plain, head = alone(family, model, ALONE, dtype=dtype), head_of(family)
    for case in cases_of(head):
        sums = back(plain, case, head)
        expected = {name: master.grad.clone() for name, master in plain._trained.masters.items()}
        plain.drop_gradients()
        scale = max(float(value.abs().max()) for value in expected.values())
        assert scale > 1e-4
        for max_tokens in (size for precision, size in RUNS if precision == dtype):
            label = f"{family}-{dtype}-{max_tokens}-{case.name}"
            parts = [load_file(rank / f"{label}.safetensors") for rank in ranks]
            assert {key for key in parts[0] if key.startswith("grad/")} == {f"grad/{weight}" for weight in expected}
            for weight, value in expected.items():
                error = float((parts[0][f"grad/{weight}"] - value).abs().max()) / scale
                assert error <= limit, f"{label} {weight}: {error:.2e}"
            assert sums_of(parts) == pytest.approx(sums, rel=1e-5, abs=1e-6), label
