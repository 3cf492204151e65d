"""Runs everything that is marked `gpu`, all that `make smoke-gpu` and `make bench-gpu` run, at tiny sizes, and the
comparison with the names of vLLM, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.bench.bench_gpu import PARTS
from tests.bench.smoke_gpu import LIMITS_S
from tests.emulated_gpu.machine import ROOT

pytestmark = pytest.mark.timeout(1200)
SEEDS = int(os.environ.get("SEEDS", "3"))
TESTS = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
WITHOUT_TESTS = [name for name in LIMITS_S if name != "gpu_tests"]
LEFT_OUT = {"rollout_vllm": "not installed: vllm"}


def passed(*arguments: str, seed: int = 0) -> str:
    """Run pytest and return what it prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "--tb=short", "-W", "ignore", "--timeout=600", *arguments]
    variables = os.environ | {"EMULATED_GPU_SEED": str(seed)}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tests_marked_gpu(seed: int) -> None:
    skipped = re.findall(r"^SKIPPED.*", passed("-m", "gpu", *TESTS, seed=seed), re.MULTILINE)
    assert all("vllm" in line for line in skipped), skipped


def test_names_of_vllm() -> None:
    passed("tests/emulated_gpu/vllm_names.py")


def lines_of(module: str, names: list[str]) -> list[dict[str, object]]:
    command = [sys.executable, "-m", module, "--small", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_checks_of_a_gpu() -> None:
    lines = lines_of("tests.bench.smoke_gpu", WITHOUT_TESTS)
    assert {line["check"]: line["ok"] for line in lines} == dict.fromkeys(WITHOUT_TESTS, True), lines


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_the_benchmark(part: str) -> None:
    (line,) = lines_of("tests.bench.bench_gpu", [part])
    assert line.get("left_out") == LEFT_OUT.get(part), line
    assert line["ok"] is (None if part in LEFT_OUT else True), line
    assert line.get("mfu") is None, "a share of a real GPU's speed"
