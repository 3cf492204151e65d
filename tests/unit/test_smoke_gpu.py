"""The checks of `make smoke-gpu` that need no GPU run on the CPU, and the other checks report what is missing."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.own_process import NO_TIME, ROOT, exit_status
from tests.bench.own_process import run as run_command
from tests.bench.smoke_gpu import LIMITS_S, WITHOUT_GPU, run


@pytest.mark.long
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


def test_a_gradient_for_which_the_host_waits_too_often_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench import smoke_checks

    @contextmanager
    def counted(device: str, times: int) -> Iterator[list[object]]:
        yield [warnings.WarningMessage("called a synchronizing operation", UserWarning, "loss.py", 7)] * times

    monkeypatch.setattr(smoke_checks, "_counted_waits", functools.partial(counted, times=smoke_checks.WAITS))
    assert smoke_checks.step_and_publish("cpu")["waits"] == smoke_checks.WAITS
    monkeypatch.setattr(smoke_checks, "_counted_waits", functools.partial(counted, times=smoke_checks.WAITS + 1))
    with pytest.raises(AssertionError, match=r"waits 2 times for a gradient: \['loss.py:7'"):
        smoke_checks.step_and_publish("cpu")


def test_every_check_has_a_limit() -> None:
    from tests.bench.smoke_checks import CHECKS

    assert set(CHECKS) == set(LIMITS_S)


def test_a_check_is_skipped_with_the_name_of_a_package_that_is_not_installed() -> None:
    def line(program: str) -> dict[str, Any]:
        return run_command([sys.executable, "-c", program], {}, 60)

    lacking = line("import no_such_wheel.part")
    assert (lacking["ok"], lacking["left_out"]) == (None, "not installed: no_such_wheel")
    ours = line("import tests.no_such_module")
    assert ours["ok"] is False
    assert "tests.no_such_module" in ours["error"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ({"ok": True}, 0),
        ({"ok": False, "error": "wrong"}, 1),
        ({"ok": None, "left_out": "not installed: vllm"}, 0),
        ({"ok": None, "left_out": NO_TIME}, 1),
    ],
)
def test_a_check_that_failed_or_had_no_time_makes_the_exit_status_1(line: dict[str, Any], status: int) -> None:
    assert exit_status([{"ok": True}, line]) == status
    assert exit_status([{"ok": None, "left_out": "not installed: vllm"}]) == 1


@pytest.mark.slow
def test_gpu_tests_whose_packages_are_not_installed_are_left_out_and_others_still_run(tmp_path: Path) -> None:
    mark = "import pytest\npytestmark = pytest.mark.gpu\n"
    (tmp_path / "test_lacking.py").write_text(f"{mark}import no_such_wheel\n")
    (tmp_path / "test_inside.py").write_text(f"{mark}def test_it():\n    import other_wheel\n")
    (tmp_path / "test_here.py").write_text(f"{mark}def test_it():\n    pass\n")
    (tmp_path / "test_wrong.py").write_text(f"{mark}def test_it():\n    assert 1 == 2\n")

    def outcome(*names: str) -> subprocess.CompletedProcess[str]:
        files = [str(tmp_path / f"test_{name}.py") for name in names]
        program = f"import json; from tests.bench.smoke_checks import run_tests; print(json.dumps(run_tests({files})))"
        return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    done = outcome("lacking", "inside", "here")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"passed": 1, "skipped": 0, "not_installed": ["no_such_wheel", "other_wheel"]}
    assert "test_wrong.py" in outcome("here", "wrong").stderr.splitlines()[-1]
    assert "Missing: not installed: no_such_wheel" in outcome("lacking").stderr
