"""Compares the megatron backend with plain transformers: the whole next-token distribution of every family, for every
split of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.ranks.layout import Layout, RankPlace
from tests.parity.groups import run_group
from tests.parity.megatron_models import FAMILIES, every_next_token, hf_model, megatron, plain_distributions, save

pytestmark = pytest.mark.timeout(300)

LAYOUTS = {
    "alone": Layout(1),
    "tp2": Layout(2, tp=2),
    "pp2": Layout(2, pp=2),
    "cp2": Layout(2, cp=2),
    "tp2xpp2": Layout(4, tp=2, pp=2),
}


def work(place: RankPlace, folder: Path) -> None:
    """Save the log-probs of every family."""
    sequences = every_next_token()
    for family in FAMILIES:
        backend = megatron(folder.parent / "models" / f"{family}-float32", place, max_tokens=600)
        for temperature in (1.0, 0.7):
            found = backend.forward(sequences, temperature)
            np.save(folder / f"rank-{place.rank}" / f"{family}-{temperature}.npy", found[sequences.loss_mask == 1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_next_token_distributions_equal_plain_transformers(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for family in FAMILIES:
        save(family, tmp_path / "models")
    run_group("tests.parity.test_megatron_logits:work", layout, tmp_path / name)
    for family in FAMILIES:
        model = hf_model(family)
        for temperature in (1.0, 0.7):
            expected = plain_distributions(model, temperature)
            assert np.ptp(expected) > 0.5
            for rank in range(layout.world_size):
                found = np.load(tmp_path / name / f"rank-{rank}" / f"{family}-{temperature}.npy")
                assert np.abs(found - expected).max() <= 1e-5, f"{family} at {temperature}"
