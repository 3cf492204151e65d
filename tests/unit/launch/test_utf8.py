"""Tests that commands work in locales whose encoding is not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.processes.programs import child_environment
from tests.unit.shared.topology.small_topology import BASE, make

ROOT = Path(__file__).parents[3]


def dry_run(folder: Path, locale: str) -> subprocess.CompletedProcess[bytes]:
    """Run `launch.cluster --dry-run` in a locale whose encoding Python would otherwise use for all files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    environment |= {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "launch.cluster", "t.yaml", "--dry-run"],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("locale", ["POSIX", "C"])
def test_a_dry_run_reads_utf_8_in_a_locale_without_it(tmp_path: Path, locale: str) -> None:
    folder = tmp_path / "modèle"
    folder.mkdir()
    make(folder)
    (folder / "t.yaml").write_text(BASE.replace("name: small", "name: né"), "utf-8")
    done = dry_run(folder, locale)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"run.name" in done.stderr
    assert b"n\\xe9" in done.stderr  # what the locale cannot show is escaped


def test_processes_of_a_run_use_utf_8_whatever_the_launcher_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "iso-8859-1")
    monkeypatch.setenv("PYTHONUTF8", "0")
    environment = child_environment(1)
    assert environment["PYTHONUTF8"] == "1"
    assert "PYTHONIOENCODING" not in environment
