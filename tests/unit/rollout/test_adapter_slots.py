"""Tests the proof of an adapter in the arrays that vLLM's kernels read, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.rollout.engine import WeightsMismatch
from services.rollout.engines.proof.adapter_slots import AdaptedLayer, slot_proof
from services.rollout.engines.proof.load_trace import Proof, WeightPart
from services.rollout.engines.proof.weights import check_proofs
from shared.weights.digests import digests_of
from shared.weights.weight_set import WeightSet

SLOTS, SLOT, RANK, SLOT_RANK = 3, 1, 6, 8
SIZES = {"q": (20, 16), "k": (20, 8), "o": (16, 20)}
"""Inputs and outputs of the layers. On two ranks, `q` and `k` are fused and cut by rows, and `o` is cut by columns."""


def adapters() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (inputs, outputs) in SIZES.items():
        tensors[f"{name}.lora_A"] = torch.randn(RANK, inputs, generator=random)
        tensors[f"{name}.lora_B"] = torch.randn(outputs, RANK, generator=random)
    return tensors


class Slots:
    """The arrays of one of two ranks, with `tensors` in SLOT."""

    def __init__(self, rank: int, tensors: dict[str, Tensor]) -> None:
        self.weights: list[WeightPart] = []
        arrays: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (inputs, outputs) in SIZES.items():
            rows, columns = (outputs, inputs // 2) if name == "o" else (outputs // 2, inputs)
            row, column = (0, rank * columns) if name == "o" else (rank * rows, 0)
            self.weights.append(WeightPart(f"{name}.weight", row, column, rows, columns))
            a, b = torch.zeros(SLOTS, 1, SLOT_RANK, columns), torch.zeros(SLOTS, 1, rows, SLOT_RANK)
            a[SLOT, 0, :RANK] = tensors[f"{name}.lora_A"][:, column : column + columns]
            b[SLOT, 0, :, :RANK] = tensors[f"{name}.lora_B"][row : row + rows]
            arrays[name] = a, b
        self.layers = {
            "qk": SimpleNamespace(
                lora_a_stacked=(arrays["q"][0], arrays["k"][0]), lora_b_stacked=(arrays["q"][1], arrays["k"][1])
            ),
            "o": SimpleNamespace(lora_a_stacked=(arrays["o"][0],), lora_b_stacked=(arrays["o"][1],)),
            "head": SimpleNamespace(
                lora_a_stacked=torch.zeros(SLOTS, 1, SLOT_RANK, 4), lora_b_stacked=torch.zeros(SLOTS, 1, 4, SLOT_RANK)
            ),
        }

    def proof(self) -> Proof:
        adapted = {name: AdaptedLayer(name, RANK, *sizes) for name, sizes in SIZES.items()}
        return Proof.of(slot_proof(self.layers, {"qk": ["q", "k"]}, SLOT, adapted, self.weights).plain())


def verdict(ranks: list[Slots]) -> str:
    tensors = adapters()
    try:
        check_proofs([rank.proof() for rank in ranks], WeightSet.of(tensors), digests_of(tensors))
    except WeightsMismatch as mismatch:
        return str(mismatch)
    return ""


def both() -> list[Slots]:
    return [Slots(rank, adapters()) for rank in (0, 1)]


def test_two_ranks_hold_an_adapter_together() -> None:
    assert verdict(both()) == ""


@pytest.mark.parametrize("name", adapters())
def test_a_wrong_bit_on_one_rank_is_named(name: str) -> None:
    tensors = adapters()
    tensors[name].view(torch.int32)[-1, -1] ^= 1  # a part of it that rank 1 has
    assert verdict([both()[0], Slots(1, tensors)]) == f"1 of 6 parameters have wrong bits: {name}"


def test_ranks_with_each_others_parts_are_named() -> None:
    one, two = both()
    one.layers, two.layers = two.layers, one.layers
    assert verdict([one, two]) == "3 of 6 parameters have wrong bits: k.lora_B, o.lora_A, q.lora_B"


def test_a_slot_must_be_zero_beside_the_adapter() -> None:
    places: dict[str, tuple[Any, tuple[int, ...]]] = {
        "q.lora_A: the rest of its slot is not zero": ("qk", (SLOT, 0, RANK, 0)),
        "head: has an adapter that the version does not have": ("head", (SLOT, 0, 0, 0)),
    }
    for said, (layer, place) in places.items():
        one, two = both()
        array = two.layers[layer].lora_a_stacked
        (array[0] if isinstance(array, tuple) else array)[place] = 1
        assert verdict([one, two]) == said
        one, two = both()
        array = two.layers[layer].lora_a_stacked
        (array[0] if isinstance(array, tuple) else array)[(SLOT - 1, *place[1:])] = 1  # another version's slot
        assert verdict([one, two]) == ""


def test_a_part_whose_place_is_unknown_is_not_guessed() -> None:
    one, two = both()
    two.weights = two.weights[1:]
    assert "q: it is not known which part of its weight this rank has" in verdict([one, two])
