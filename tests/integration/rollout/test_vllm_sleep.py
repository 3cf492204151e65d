"""Tests vLLM's sleep on a GPU through the engine's protocol: memory is freed and restored in parts, and new weights are
verified.

The test needs a CUDA device and `make setup-vllm`; for a CPU, see `test_vllm_colocated`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.integration.rollout.vllm_case import TINY, Case
from tests.integration.rollout.vllm_process import TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm"),
    pytest.mark.timeout(400),
]


def test_a_sleep_frees_all_memory_and_the_next_version_is_verified_after_the_cache_is_back(tmp_path: Path) -> None:
    case = Case(TINY)
    case.run(tmp_path, "tests.integration.rollout.vllm_sleep_process")
    awake, asleep, with_weights, again = case.answer["free_bytes"]
    assert asleep - awake > 1 << 30  # Most of this memory is keys and values.
    assert asleep - with_weights < 1 << 30
    assert with_weights - again > 1 << 30
    assert case.answer["canary_error"] <= TOLERANCE
    assert case.error("before", 1, 1.0) < TOLERANCE
    assert case.error("after", 2, 1.0) < TOLERANCE
