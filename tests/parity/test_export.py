"""Tests that transformers can load and score the exports of every backend and layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.calls.weights import export
from services.policy_trainer.worker.megatron.backend import MegatronBackend
from shared.model.load import load_model, named_weights
from shared.ranks.layout import Layout, RankPlace
from shared.topology.passes import FASTEST
from tests.parity.gradient_cases import back, cases
from tests.parity.groups import run_group
from tests.parity.megatron_models import (
    CRITICS,
    FAMILIES,
    MIXTURES,
    every_next_token,
    head_of,
    megatron,
    options,
    plain_distributions,
    plain_values,
    save,
)
from tests.parity.test_megatron_gradients import TRAINING
from tests.unit.policy_trainer.training import adamw

pytestmark = pytest.mark.timeout(300)

LIMITS = {"float32": 1e-5, "bfloat16": 0.1}
"""Maximum difference in a log-prob or a value. Weights are compared bit for bit, so this limit applies only to the two
forward passes."""
LAYOUTS = {
    "torch": {"1": Layout(1), "2 workers": Layout(2), "cp2": Layout(2, cp=2), "4 workers, cp2": Layout(4, cp=2)},
    "megatron": {
        "1": Layout(1),
        "2 workers": Layout(2),
        "tp2": Layout(2, tp=2),
        "pp2": Layout(2, pp=2),
        "cp2": Layout(2, cp=2),
        "4 workers, tp2": Layout(4, tp=2),
        "4 workers, pp2": Layout(4, pp=2),
        "tp2, pp2": Layout(4, tp=2, pp=2),
    },
}


def work(backend: str, place: RankPlace, folder: Path) -> None:
    """Train twice, export and score, for every family and dtype that the test has saved."""
    for model in sorted((folder.parent / "models").iterdir()):
        family, _, dtype = model.name.rpartition("-")
        head = head_of(family)
        trained: TorchBackend | MegatronBackend
        if backend == "megatron":
            trained = megatron(model, place, dtype=dtype)
        else:
            own = replace(options(folder / "scratch" / model.name, head=head), passes=FASTEST)
            trained = TorchBackend(model, dtype, own, place)
        for step, case in zip((1, 2), cases(), strict=False):
            back(trained, case, head)
            trained.step(step, adamw(step, **TRAINING))
        export(trained, model, folder / "export" / model.name)
        outputs = trained.forward(every_next_token(), 1.0)[every_next_token().loss_mask == 1]
        np.save(folder / f"rank-{place.rank}" / f"{model.name}.npy", outputs)
        if weights := trained.weights():
            whole = {name: each.clone(memory_format=torch.contiguous_format) for name, each in weights.items()}
            save_file(whole, folder / f"weights-{model.name}")


torch_work, megatron_work = functools.partial(work, "torch"), functools.partial(work, "megatron")


def check(
    backend: str, layout: Layout, families: list[str], folder: Path, dtypes: tuple[str, ...] = tuple(LIMITS)
) -> None:
    for family in families:
        for dtype in dtypes:
            save(family, folder / "models", dtype)
    ranks = folder / "ranks"
    run_group(f"tests.parity.test_export:{backend}_work", layout, ranks)
    for model in (folder / "models").iterdir():
        family, _, dtype = model.name.rpartition("-")
        written, head = ranks / "export" / model.name, head_of(family)
        library: Any = AutoModelForCausalLM if head == "language" else AutoModelForSequenceClassification
        exported = library.from_pretrained(written).eval()
        assert exported.dtype == getattr(torch, dtype)
        trained, untrained = load_file(ranks / f"weights-{model.name}"), load_file(model / "model.safetensors")
        found = named_weights(exported)
        assert found.keys() == trained.keys() == untrained.keys()
        again = named_weights(load_model(written, dtype, head))
        assert all(torch.equal(each, found[name]) and torch.equal(each, again[name]) for name, each in trained.items())
        assert not any(torch.equal(each, untrained[name]) for name, each in trained.items())
        plain = exported.float()
        expected = plain_distributions(plain, 1.0) if head == "language" else plain_values(plain)
        for rank in range(layout.world_size):
            scored = np.load(ranks / f"rank-{rank}" / f"{model.name}.npy")
            assert np.abs(scored - expected).max() <= LIMITS[dtype], f"{family} {dtype} rank {rank}"


@pytest.mark.parametrize("backend", LAYOUTS)
def test_one_rank_exports_the_weights_that_it_trained(backend: str, tmp_path: Path) -> None:
    check(backend, Layout(1), ["llama-untied", *CRITICS], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(4, pp=2, ep=2)], ids=["ep2", "pp2, ep2"])
def test_expert_parallel_ranks_export_the_weights_that_they_trained(layout: Layout, tmp_path: Path) -> None:
    check("megatron", layout, list(MIXTURES), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend, names in LAYOUTS.items() for name in names])
def test_every_layout_exports_the_weights_that_it_trained(backend: str, name: str, tmp_path: Path) -> None:
    check(backend, LAYOUTS[backend][name], [*FAMILIES, *CRITICS], tmp_path)
