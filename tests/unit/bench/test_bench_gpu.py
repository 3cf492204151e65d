"""The parts of `make bench-gpu` run on the CPU with small models, so that they still work when a GPU is at hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.bench_gpu import GOALS, LIMITS_S, PARTS, ROOT
from tests.bench.train_parts import (
    FULL,
    HIDDEN_7B,
    INNER_7B,
    SLICE_MICRO_BATCH,
    STATE_BYTES,
    VOCABULARY_7B,
    layers_that_fit,
)

ON_THE_CPU = [name for name in PARTS if name != "rollout_vllm"]
"""Starting vLLM takes as long as all the others, and its engine has tests of its own."""


@pytest.mark.slow
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
