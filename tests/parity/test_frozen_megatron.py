"""Tests that a reference whose model is split across ranks returns the same log-probs as a torch model on one rank,
before and after the reference loads different weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.tensors import Array
from services.reference.frozen import Frozen, FrozenTorch
from services.reference.frozen_megatron import FrozenMegatron
from shared.model.load import mismatched_weights
from shared.ranks.layout import Layout, RankPlace
from shared.topology.passes import FASTEST
from tests.parity.groups import run_group
from tests.parity.megatron_models import FAMILIES, every_next_token, save

pytestmark = pytest.mark.timeout(300)

LAYOUTS = {"tp2": Layout(2, tp=2), "pp2xcp2": Layout(4, pp=2, cp=2)}
LIMIT = 1e-5
VALUE = "value"
"""Name of the folder of a model with a value head."""
MAX_TOKENS = 10
"""Maximum number of tokens in a micro-batch, small enough to give several micro-batches."""


def other_weights(model: Path) -> dict[str, Array]:
    """Return perturbed weights of the folder's model."""
    return {name: (each * 1.1).numpy() for name, each in load_file(model / "model.safetensors").items()}


def both(frozen: Frozen, model: Path) -> Array:
    """Return log-probs [2, T] under the folder's weights and under `other_weights`, at two temperatures."""
    given = every_next_token()
    counted: list[None] = []

    def scored(temperature: float) -> Array:
        return frozen.logprobs(
            given.token_ids, given.lengths, given.loss_mask, temperature, lambda: counted.append(None)
        )

    frozen.load()
    first = scored(0.7)
    weights = other_weights(model)
    assert not mismatched_weights(frozen.shapes, {name: each.shape for name, each in weights.items()})
    assert mismatched_weights(frozen.shapes, {name: (*each.shape, 1) for name, each in list(weights.items())[:-1]})
    frozen.take(weights)
    second = scored(1.0)
    frozen.load()
    assert np.array_equal(scored(0.7), first)
    assert len(counted) > 3
    return np.stack([first, second])


def values(frozen: Frozen) -> Array:
    """Return the values before every token, as those of a reward model."""
    given = every_next_token()
    frozen.load()
    return frozen.logprobs(given.token_ids, given.lengths, given.loss_mask, 1.0, lambda: None)


def work(place: RankPlace, folder: Path) -> None:
    for family in FAMILIES:
        model = folder.parent / "models" / f"{family}-float32"
        frozen = FrozenMegatron(model, "float32", MAX_TOKENS, place, "cpu")
        np.save(folder / f"rank-{place.rank}" / f"{family}.npy", both(frozen, model))
        assert not any(each.requires_grad for each in frozen.tensors())
    scorer = FrozenMegatron(folder.parent / "models" / VALUE, "float32", MAX_TOKENS, place, "cpu", "value")
    np.save(folder / f"rank-{place.rank}" / f"{VALUE}.npy", values(scorer))


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2xcp2", marks=pytest.mark.long)])
def test_every_rank_returns_the_log_probs_of_the_whole_model(layout: str, tmp_path: Path) -> None:
    models = {family: save(family, tmp_path / "models") for family in FAMILIES}
    classifier = Path(shutil.copytree(models["qwen3-tied"], tmp_path / "models" / VALUE))
    tensors = load_file(classifier / "model.safetensors")
    head = torch.randn(1, tensors["model.norm.weight"].shape[0], generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "score.weight": head}, classifier / "model.safetensors", {"format": "pt"})
    run_group("tests.parity.test_frozen_megatron:work", LAYOUTS[layout], tmp_path / layout)
    for family, model in models.items():
        expected = both(FrozenTorch(model, "float32", MAX_TOKENS, passes=FASTEST), model)
        assert np.abs(expected[0] - expected[1]).max() > 1e-2
        for rank in range(LAYOUTS[layout].world_size):
            found = np.load(tmp_path / layout / f"rank-{rank}" / f"{family}.npy")
            assert np.abs(found - expected).max() <= LIMIT, f"{family} on rank {rank}"
    expected = values(FrozenTorch(classifier, "float32", MAX_TOKENS, passes=FASTEST, head="value"))
    assert np.abs(expected).max() > 0.1
    for rank in range(LAYOUTS[layout].world_size):
        found = np.load(tmp_path / layout / f"rank-{rank}" / f"{VALUE}.npy")
        assert np.abs(found - expected).max() <= LIMIT * 10, f"value head on rank {rank}"
