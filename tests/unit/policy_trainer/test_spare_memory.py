"""Tests when gathered weights may stay on the GPU. A stand-in measures the GPU's memory."""

from __future__ import annotations

import pytest
import torch

from services.policy_trainer.worker.spare_memory import MemoryUse, SpareMemory

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
WEIGHTS = 30


def spare(*peaks: int, total: int = 100) -> SpareMemory:
    """Return the spare memory of a GPU whose peak takes the values of `peaks`, one per question."""
    left = iter(peaks)
    return SpareMemory(GPU, lambda _: MemoryUse(next(left), total))


@pytest.mark.parametrize(("peak", "place"), [(60, GPU), (61, CPU)])
def test_weights_stay_on_the_gpu_only_if_the_peak_of_training_leaves_room_for_them(
    peak: int, place: torch.device
) -> None:
    memory = spare(peak)
    memory.updated()
    assert memory.place_for(WEIGHTS) == place


def test_weights_go_to_the_host_until_an_update_has_shown_how_much_training_needs() -> None:
    memory = spare(0)
    assert memory.place_for(WEIGHTS) == CPU
    memory.updated()
    assert memory.place_for(WEIGHTS) == GPU


def test_a_peak_that_includes_the_copy_leaves_room_for_the_next_one() -> None:
    memory = spare(60, 90, 91)
    memory.updated()
    assert [memory.place_for(WEIGHTS) for _ in range(3)] == [GPU, GPU, CPU]


def test_on_a_cpu_weights_are_in_host_memory() -> None:
    memory = SpareMemory(CPU)
    memory.updated()
    assert memory.place_for(WEIGHTS) == CPU
