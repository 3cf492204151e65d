"""Tests that the FLOP formula behind MFU agrees with torch's counter and that a measurement uses new lengths in every
round.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.model_flops import peak_flops, training_flops
from tests.bench.train_parts import ROUNDS, utilisation
from tests.unit.tiny_models import make_model


@pytest.mark.parametrize("tied", [True, False])
def test_the_formula_counts_every_matrix_product(tied: bool) -> None:
    model = make_model("qwen3", head_dim=16, tie_word_embeddings=tied)
    model.set_attn_implementation("eager")
    ids = torch.zeros((2, 24), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    found = training_flops(model, model.config, [24, 24])
    # torch also counts the rotary angles, and the embedding lookup has no gradient product.
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_causal_attention_counts_only_the_pairs_that_the_mask_allows() -> None:
    model = make_model("qwen3", head_dim=16)
    lengths = [7, 24]
    whole, causal = (training_flops(model, model.config, lengths, how) for how in ("whole", "causal"))
    dense = training_flops(model, model.config, [1] * sum(lengths), "causal")
    per_pair = (whole - causal) / sum(n * n - n * (n + 1) // 2 for n in lengths)
    assert causal == pytest.approx(dense + per_pair * sum(n * (n - 1) // 2 for n in lengths))


def test_every_round_of_a_measurement_has_new_lengths_and_counts_its_own_operations() -> None:
    found = utilisation("cpu")
    assert len(found["rounds"]) == ROUNDS
    assert len({tuple(each["lengths"]) for each in found["rounds"]}) == ROUNDS
    seconds = sum(each["seconds"] for each in found["rounds"])
    for how in ("whole", "causal"):
        assert found["flops_per_s"][how] == pytest.approx(sum(each[how] for each in found["rounds"]) / seconds)
    assert found["flops_per_s"]["causal"] < found["flops_per_s"]["whole"]


def test_a_device_is_recognised_by_part_of_its_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Something Else 9000") is None
