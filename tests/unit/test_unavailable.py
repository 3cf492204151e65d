"""If a machine cannot run a test, the test is skipped with the reason, but it fails in CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration import netns, two_hosts
from tests.integration.store_process import small_mount

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = r"^(?:PASSED|FAILED|ERROR) \S*\b(test_\w+)(?:\.py)?( - must not be skipped in CI)?"
EVERY_WAY = """
import pytest

@pytest.fixture
def machine():
    pytest.skip("no machine")

def test_fixture(machine): ...

def test_body():
    pytest.skip("no body")

@pytest.mark.skipif(True, reason="no reason")
def test_mark(): ...

def test_import():
    pytest.importorskip("no_such_package")

@pytest.mark.xfail
def test_xfail():
    raise AssertionError

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no device")

def test_runs(): ...
"""


@pytest.mark.parametrize("made", [netns.two_hosts, two_hosts.two_hosts, contextmanager(small_mount)])
def test_tests_that_need_an_impossible_environment_are_skipped_with_the_missing_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Callable[..., AbstractContextManager[Any]]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # Neither `ip` nor `mount` is found.
    arguments = () if "two_hosts" in made.__name__ else (tmp_path / "mount", 1 << 20)
    with pytest.raises(pytest.skip.Exception, match=r"\b(ip|mount)\b"), made(*arguments):
        raise AssertionError("the environment was created")


def test_only_gpu_tests_are_skipped_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_every_way.py").write_text(EVERY_WAY)
    (tmp_path / "test_module.py").write_text('import pytest\npytest.importorskip("no_such_package")\n')
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", "-rA"]
    command += ["--continue-on-collection-errors", str(tmp_path)]
    environment = {**os.environ, "CI": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = dict(re.findall(SUMMARY, done.stdout, re.M))
    assert found.pop("test_runs") == ""
    assert sorted(found) == [f"test_{way}" for way in ("body", "fixture", "import", "mark", "module", "xfail")]
    assert all(found.values()), done.stdout
    assert "1 passed, 1 skipped" in done.stdout  # The skipped test is test_gpu.
