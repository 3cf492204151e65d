"""The parts of `make bench-gpu` run on the CPU with small models, so that they still work when a GPU is at hand, and
count operations as torch does.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.bench_gpu import GOALS, LIMITS_S, PARTS, ROOT
from tests.bench.model_flops import peak_flops, training_flops
from tests.bench.train_parts import (
    FULL,
    HIDDEN_7B,
    INNER_7B,
    ROUNDS,
    SLICE_MICRO_BATCH,
    STATE_BYTES,
    VOCABULARY_7B,
    layers_that_fit,
    utilisation,
)
from tests.unit.tiny_models import make_model

ON_THE_CPU = [name for name in PARTS if name != "rollout_vllm"]
"""Starting vLLM takes as long as all the others, and its engine has tests of its own."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_part_measures_something_on_a_cpu() -> None:
    command = [sys.executable, "-m", "tests.bench.bench_gpu", "--device", "cpu", "--only", *ON_THE_CPU]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {line["part"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {name: line["ok"] for name, line in found.items()} == dict.fromkeys(ON_THE_CPU, True), done.stdout
    assert done.returncode == 0
    assert {name: line.get("goal") for name, line in found.items()} == {name: GOALS.get(name) for name in ON_THE_CPU}
    for name in ("mfu_06b", "mfu_7b_slice"):
        assert 0 < found[name]["flops_per_s"]["causal"] < found[name]["flops_per_s"]["whole"]
        assert found[name]["plain_tokens_per_s"] > 0
    assert found["rollout_transformers"]["tokens_per_s"] > 0
    assert found["sync_shards"]["transformers"]["of_copy"] > 0
    assert found["sync_device"]["of_copy"] > 0
    for side in ("ours", "fsdp2"):
        assert 0 < found["update"][side]["update_tokens_per_s"] < found["update"][side]["tokens_per_s"]
    assert found["step"]["samples_per_s"] > 0


def test_every_part_has_a_limit() -> None:
    assert list(PARTS) == list(LIMITS_S)
    assert set(GOALS) <= set(PARTS)


@pytest.mark.parametrize("gib", [48, 80, 140])
def test_the_slice_has_as_many_layers_as_fit_with_their_training_state(gib: int) -> None:
    def needed(layers: int) -> int:
        parameters = layers * (HIDDEN_7B * (2 * HIDDEN_7B + 2 * 512 + 3 * INNER_7B)) + 2 * HIDDEN_7B * VOCABULARY_7B
        kept = layers * SLICE_MICRO_BATCH * (40 * HIDDEN_7B + 8 * INNER_7B)
        return STATE_BYTES * parameters + kept + (4 << 30)

    layers, room = layers_that_fit(gib << 30), FULL * (gib << 30)
    assert layers >= 1
    assert needed(layers) <= room < needed(layers + 1)


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
