"""The FLOP formula behind MFU agrees with torch's counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.model_flops import peak_flops, training_flops
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


def test_a_device_is_recognised_by_part_of_its_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Something Else 9000") is None
