"""Checks gradients and metrics of mixtures of experts in float64: micro-batches, data-parallel ranks and context ranks
give what one process gives in one micro-batch, also with replayed routes and balanced loads."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.model.logprobs import Routing
from shared.model.routing import Routers, routers_of
from shared.ranks.layout import Layout, RankPlace
from shared.topology.models import Head
from shared.topology.passes import FASTEST
from tests.parity.gradient_cases import VOCAB, Case, cases
from tests.parity.groups import run_group, sums_of
from tests.unit.tiny_models import make_model

pytestmark = pytest.mark.timeout(300)
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "head_dim": 12,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4},
}
MODES = ("own", "balanced", "replayed", "tied")
"""Routers choose; they choose and their load is balanced; they replay routes; they replay and all logits are equal."""
RUNS = (*(("qwen3_moe", mode) for mode in MODES), ("mixtral", "balanced"))
LAYOUTS = {"dp2": Layout(2), "cp2": Layout(2, cp=2)}
ALONE = Layout(1).place(0)
CASES = [case for case in cases() if case.name in ("rank-empty", "sequences-masked")]
WHOLE, PART = 4096, 30
"""Sizes of micro-batches. Layers are recomputed with the smaller one."""
LIMIT = 1e-12
LEAST_MARGIN = 1e-6
"""Smallest difference of the logits of a chosen and of another expert in the data, where routers choose."""
COEF = 0.5


def backend_of(kind: str, place: RankPlace, folder: Path, max_tokens: int, *, tied: bool = False) -> TorchBackend:
    def load(_: Path, name: str, head: Head) -> torch.nn.Module:
        # `grouped_mm`, the default, does not compute in float64.
        options = {**MIXTURES[kind], "vocab_size": VOCAB, "experts_implementation": "eager"}
        model: torch.nn.Module = make_model(kind, dtype=torch.float64, **options)
        assert model.config._experts_implementation == "eager"
        if tied:
            for parameter in (each for name, each in model.named_parameters() if name.endswith("gate.weight")):
                torch.nn.init.zeros_(parameter)
        return model

    options = BackendOptions(
        max_tokens=max_tokens,
        threads=1,
        device="cpu",
        scratch=folder / f"of-{os.getpid()}",
        recompute="layers" if max_tokens < WHOLE else "none",
        passes=FASTEST,
    )
    return TorchBackend(folder, "float64", options, place, load=load, load_shapes=load)


def routers_in(backend: TorchBackend) -> Routers:
    routers = routers_of(backend.model)
    assert routers is not None
    return routers


def given_routes(case: Case, routers: Routers) -> Array:
    """Return routes for all tokens, drawn for each of them, so that sequences with the same prompt differ in them."""
    shape = (len(case.flat["token_ids"]), routers.layers, routers.experts)
    drawn = np.random.default_rng(5).random(shape).argsort(-1)[..., : routers.chosen]
    return routers.packed(torch.from_numpy(drawn)).numpy()


def run(backend: TorchBackend, case: Case, mode: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the whole gradients (on rank 0), and this rank's sums."""
    place = backend.place
    routes = given_routes(case, routers_in(backend))
    case = replace(case, flat={**case.flat, "routes": routes})
    flat, advantages, weights = case.of(place.dp_rank, place.layout.dp)
    loss = BatchLoss(case.spec, flat, advantages, weights, "cpu")
    sequences = Sequences(
        flat["token_ids"],
        flat["lengths"],
        flat["loss_mask"],
        routing=Routing(flat["routes"] if mode in ("replayed", "tied") else None),
        balance=0.0 if mode == "own" else COEF,
    )
    sums = backend.forward_backward(sequences, case.spec.temperature, loss, entropy=loss.entropy)
    trained = backend._trained
    found = {name: trained.whole(master.grad) for name, master in trained.masters.items()}
    backend.drop_gradients()
    return found, sums


def work(place: RankPlace, folder: Path) -> None:
    for kind, mode in RUNS:
        backend = backend_of(kind, place, folder, PART, tied=mode == "tied")
        for case in CASES:
            found, sums = run(backend, case, mode)
            out = {f"grad/{name}": value for name, value in found.items() if place.rank == 0}
            out |= {f"sum/{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
            save_file(out, folder / f"rank-{place.rank}" / f"{kind}-{mode}-{case.name}.safetensors")


class Margins:
    """The smallest difference between the logits of a chosen expert and of another one, while routers choose."""

    def __init__(self, backend: TorchBackend) -> None:
        self.least, chosen = float("inf"), routers_in(backend).chosen
        for name, module in backend.model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(lambda _, __, output: self._see(output[0], chosen))

    def _see(self, logits: torch.Tensor, chosen: int) -> None:
        ordered = logits.sort(-1, descending=True).values
        self.least = min(self.least, float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))


def agrees(
    name: str, found: dict[str, torch.Tensor], sums: dict[str, float], wanted: dict[str, torch.Tensor], of: Any
) -> None:
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert scale > 1e-4
    for weight, value in wanted.items():
        error = float((found[weight] - value).abs().max()) / scale
        assert error <= LIMIT, f"{name} {weight}: {error:.2e}"
    for key in ("moe_load_max", "moe_unused_max"):
        assert sums[key] == of[key], (name, key)
    assert sums == pytest.approx(of, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_splits_of_a_batch_give_the_same_gradients_and_loads(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    run_group("tests.parity.test_experts:work", layout, tmp_path / name)
    for kind, mode in RUNS:
        alone = backend_of(kind, ALONE, tmp_path, WHOLE, tied=mode == "tied")
        margins = Margins(alone)
        for case in CASES:
            wanted, sums = run(alone, case, mode)
            assert any(name.endswith("gate.weight") and value.any() for name, value in wanted.items())
            label = f"{kind}-{mode}-{case.name}"
            files = [tmp_path / name / f"rank-{rank}" / f"{label}.safetensors" for rank in range(layout.world_size)]
            parts = [load_file(file) for file in files]
            found = {key.removeprefix("grad/"): value for key, value in parts[0].items() if key[:5] == "grad/"}
            agrees(label, found, sums_of(parts), wanted, sums)
        if mode in ("own", "balanced"):
            print(f"{kind}, {mode}: least margin {margins.least:.2e}")
            assert margins.least > LEAST_MARGIN


@pytest.mark.parametrize(("kind", "mode"), RUNS)
def test_every_size_of_micro_batches_gives_the_same_gradients_and_loads(kind: str, mode: str, tmp_path: Path) -> None:
    whole = backend_of(kind, ALONE, tmp_path, WHOLE, tied=mode == "tied")
    for size, case in itertools.product((22, 61), CASES):
        wanted, of = run(whole, case, mode)
        found, sums = run(backend_of(kind, ALONE, tmp_path, size, tied=mode == "tied"), case, mode)
        agrees(f"{kind} {mode} {case.name} {size}", found, sums, wanted, of)
