"""The checks of `make smoke-gpu` that need no GPU run on the CPU, and the other checks report what is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.bench.smoke_gpu import LIMITS_S, ROOT, WITHOUT_GPU, run


@pytest.mark.slow
def test_checks_that_need_no_gpu_measure_something() -> None:
    command = [sys.executable, "-m", "tests.bench.smoke_gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["check"]: line["ok"] for line in lines} == dict.fromkeys(WITHOUT_GPU, True), done.stdout
    assert done.returncode == 0
    found = {line["check"]: line for line in lines}
    assert found["versions"]["torch"] == torch.__version__
    assert all(each["first_ms"] > 0 for name, each in found["attention"].items() if "keys" in name)
    assert 1 <= found["locked_memory"]["held_over_bytes"] < 1.2
    assert len(found["step_and_publish"]["steps_s"]) == 3
    assert found["utilisation"]["tokens_per_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_every_check_is_skipped_and_none_passes_without_a_device() -> None:
    line = run("nccl_one_rank", "cuda", 60)
    assert (line["ok"], line["left_out"]) == (None, "no CUDA device")


def test_a_check_that_fails_or_takes_too_long_is_not_ok() -> None:
    assert "not done within" in run("versions", "cpu", 0.01)["error"]
    assert "KeyError" in run("no_such_check", "cpu", 60)["error"]


def test_every_check_has_a_limit() -> None:
    from tests.bench.smoke_checks import CHECKS

    assert set(CHECKS) == set(LIMITS_S)
