"""A host with a different release of rlbus, a different torch version, no model, and a clock that is behind."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.integration.tiny.harness import ROOT

MODELS = ROOT / "launch" / "topologies" / "models"
_LATE_CLOCK = "import time\n_read = time.time\ntime.time = lambda: _read() - 100.0\n"
PROBLEMS = [
    "a different rlbus (code ",
    "torch 1.0, here ",
    "its clock is 1",
    f"policy.model: no folder {MODELS}/",
]
"""How the lines begin that report its differences."""


def odd_host(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs the command after it on such a host, and the environment that this needs.

    The host has its own view of the file system, and Python's start-up hook sets its clock.
    """
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a host with other files needs root and `unshare` (apt package util-linux)")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_LATE_CLOCK)
    torch = distribution("torch")
    installed = Path(str(torch.locate_file(f"torch-{torch.version}.dist-info/METADATA")))
    (folder / "METADATA").write_text(installed.read_text().replace(f"Version: {torch.version}", "Version: 1.0"))
    source = ROOT / "shared" / "stages.py"
    (folder / "stages.py").write_text(source.read_text() + "# another release\n")
    mounts = [f"mount --bind {folder / 'METADATA'} {installed}", f"mount --bind {folder / 'stages.py'} {source}"]
    setup = " && ".join([*mounts, f"mount -t tmpfs none {MODELS}", 'exec "$@"'])
    own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return [*own, "sh", "-c", setup, "host"], {"PYTHONPATH": str(folder)}


def begins(lines: list[str], prefix: str) -> list[str]:
    """Return the entries of PROBLEMS with which the lines begin after `prefix`, or the line itself."""
    return [next((each for each in PROBLEMS if line.startswith(prefix + each)), line) for line in lines]
