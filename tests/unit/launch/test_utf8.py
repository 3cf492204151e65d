"""Tests that commands work in locales whose encoding is not UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.processes.programs import child_environment
from services.recorder.files import SampleFiles
from shared.samples.record import SampleRecord
from tests.unit.shared.topology.small_topology import BASE, make

ROOT = Path(__file__).parents[3]
TEXT = "“é” 日本"


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


def run_with_samples(folder: Path, count: int) -> Path:
    """Return a run directory with the samples of one step, whose texts no one-byte encoding has."""
    run = folder / "run"
    run.mkdir()
    names = {"run": "run", "sockets": str(folder / "sockets"), "shm": str(folder / "shm")}
    (run / "run.json").write_text(json.dumps(names))
    texts = [SampleRecord(task=f"train/0/{number}", step=1, sample=0, completion=TEXT) for number in range(count)]
    SampleFiles(run / "samples", 1 << 30).append(texts)
    return run


def samples_command(run: Path) -> list[str]:
    return [sys.executable, "-m", "launch.ctl", "--run", str(run), "samples", "--best", "9999", "--full"]


@pytest.mark.parametrize(
    ("names", "encoding"),
    [
        ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ascii"),
        ({"LC_ALL": "POSIX", "PYTHONIOENCODING": "iso-8859-1"}, "iso-8859-1"),
        ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "iso-8859-1"}, "iso-8859-1"),
        ({"LC_ALL": "C.UTF-8"}, "utf-8"),
    ],
)
def test_samples_are_shown_with_what_the_output_lacks_escaped(
    tmp_path: Path, names: dict[str, str], encoding: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        samples_command(run_with_samples(tmp_path, 1)),
        env={**kept, "PYTHONPATH": str(ROOT), **names},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert TEXT.encode(encoding, "backslashreplace") in done.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path, options: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as gone:
        command = [*samples_command(run_with_samples(tmp_path, 1)), *options]
        done = subprocess.run(command, cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


def test_processes_of_a_run_use_utf_8_whatever_the_launcher_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "iso-8859-1")
    monkeypatch.setenv("PYTHONUTF8", "0")
    environment = child_environment(1)
    assert environment["PYTHONUTF8"] == "1"
    assert "PYTHONIOENCODING" not in environment
