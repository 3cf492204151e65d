"""Checks that correct syncs of 16-bit weights are never refused: many syncs of a small model and some of a larger
one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.bench.random_model import save_random_qwen2
from tests.bench.weight_sync import measure_alone
from tests.integration.rollout.vllm_case import TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
VLLM = pytest.param(
    "vllm",
    marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
)


@pytest.mark.parametrize("engine", ["transformers", VLLM])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_false_alarm_in_500_syncs(engine: str, dtype: str) -> None:
    """Each version is one step of a random walk and passes through a store as in a run; a refusal ends the process."""
    measured = measure_alone(engine, TINY, 500, 1, dtype, limit_s=1700)
    assert len(measured.syncs) == 500
    assert 0 <= measured.largest_error <= measured.tolerance


@pytest.mark.parametrize("engine", ["transformers", VLLM])
def test_no_false_alarm_on_a_random_model_of_half_a_billion_weights(engine: str, tmp_path: Path) -> None:
    save_random_qwen2(tmp_path / "qwen2")
    measured = measure_alone(engine, tmp_path / "qwen2", 3, 2, "bfloat16", limit_s=1700)
    assert measured.nbytes > 900 << 20
    assert 0 <= measured.largest_error <= measured.tolerance
