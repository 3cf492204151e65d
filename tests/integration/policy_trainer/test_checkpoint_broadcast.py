"""Tests that a checkpoint that only rank 0 can read reaches the other ranks byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policy_trainer.worker.checkpoint import SavedState, broadcast
from shared.ranks.layout import Layout, RankPlace
from tests.parity.groups import run_group

STATE = SavedState(
    7,
    weights={"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(4, generator=torch.Generator().manual_seed(1))},
    optimizer={"step/a": torch.tensor(7.0), "exp_avg/a": torch.full((3, 5), torch.nan), "none": torch.empty(0, 3)},
)


def receive(place: RankPlace, folder: Path) -> None:
    """Receive the state that rank 0 has read from files."""
    read = [load_file(folder.parent / f"{name}.safetensors") for name in ("weights", "optimizer")]
    state = broadcast(SavedState(STATE.step, *read) if place.rank == 0 else None)
    assert (state.step, state.earlier) == (STATE.step, {})
    save_file(state.weights, folder / f"rank-{place.rank}" / "weights.safetensors")
    save_file(state.optimizer, folder / f"rank-{place.rank}" / "optimizer.safetensors")


@pytest.mark.slow
def test_every_rank_has_the_bytes_that_rank_0_read(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    save_file(STATE.weights, tmp_path / "weights.safetensors")
    save_file(STATE.optimizer, tmp_path / "optimizer.safetensors")
    run_group(f"{__name__}:receive", Layout(3), folder)
    for name in ("weights", "optimizer"):
        expected = (tmp_path / f"{name}.safetensors").read_bytes()
        for rank in range(3):
            assert (folder / f"rank-{rank}" / f"{name}.safetensors").read_bytes() == expected
