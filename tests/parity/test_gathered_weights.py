"""Tests where the weights that several ranks gather for a publication are kept. Device `meta` stands in for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policy_trainer.worker.spare_memory import SpareMemory
from services.policy_trainer.worker.weights.channels import LiveWeights
from shared.ranks.layout import Layout, RankPlace
from tests.parity.groups import run_group
from tests.parity.megatron_models import alone, megatron, save

FAMILY = "qwen3-tied"
GPU = torch.device("meta")


class Roomy:
    """The spare memory of a GPU with much room."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def place_for(self, nbytes: int) -> torch.device:
        self.asked.append(nbytes)
        return GPU


def publish(place: RankPlace, folder: Path) -> None:
    """Gather the weights without and with room for them on the device."""
    model = folder.parent / "models" / f"{FAMILY}-bfloat16"
    shards = alone(FAMILY, model, Layout(2).place(place.rank), dtype="bfloat16")
    pieces = megatron(model, place, dtype="bfloat16")
    for name, backend in (("torch", shards), ("megatron", pieces)):
        on_host = backend.weights()
        if place.rank == 0:
            save_file({key: each.clone() for key, each in on_host.items()}, folder / f"{name}.safetensors")
        roomy = Roomy()
        backend._trained._spare = cast(SpareMemory, roomy)
        on_device = backend.weights()
        assert on_device.keys() == on_host.keys()
        if place.rank == 0:
            assert roomy.asked == [sum(each.nbytes for each in on_host.values())]
            assert {each.device for each in on_device.values()} == {GPU}
            live = LiveWeights("meta")
            live.show((1, 1), on_device)
            assert live.parameters((1, 1)) is not None
        else:
            assert on_device == {}


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2)], ids=["dp2", "tp2"])
def test_weights_gathered_by_several_ranks_stay_on_the_device_if_it_has_room(layout: Layout, tmp_path: Path) -> None:
    model = save(FAMILY, tmp_path / "models", "bfloat16")
    run_group("tests.parity.test_gathered_weights:publish", layout, tmp_path / "ranks")
    expected = load_file(model / "model.safetensors")
    for name in ("torch", "megatron"):
        found = load_file(tmp_path / "ranks" / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], value) for each, value in expected.items())
