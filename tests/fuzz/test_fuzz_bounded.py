"""Tests that the coverage-guided target finds nothing within a bounded time, and that it fails if an input reaches a
defect."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20
BUSY, LAZY = b"code\xa4busy", b"code\xa4lazy"
SEALED = 1
"""First byte of an input that selects the decoder of bodies, as in fuzz_wire."""
PLANTED = """
import sys
import tests.fuzz.fuzz_wire as target
from proto import codec
from proto.messages import ErrorCode
CODES = set(ErrorCode)
whole = codec.decode_body
def broken(kind, data):
    body = whole(kind, data)
    if type(body).__name__ == "Error" and body.code not in CODES:
        raise KeyError("planted")
    return body
codec.decode_body = broken
import atheris
atheris.Setup(sys.argv, target.one_input)
atheris.Fuzz()
"""


def needs_atheris() -> None:
    if find_spec("atheris") is None:
        pytest.skip("atheris (make setup-dev)")


def fuzz(folder: Path, *program: str, seconds: int) -> subprocess.CompletedProcess[str]:
    seeds = folder / "seeds"
    seeds.mkdir()
    made = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz_wire", "--seeds", str(seeds)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(made.stdout.split()[-1]) > 20
    trigger = next(each for each in seeds.iterdir() if BUSY in (data := each.read_bytes()) and data[0] == SEALED)
    (seeds / "trigger").write_bytes(trigger.read_bytes().replace(BUSY, LAZY))
    options = [f"-max_total_time={seconds}", "-rss_limit_mb=1024", "-max_len=8192", f"-artifact_prefix={folder}/"]
    # The command runs through a shell, because libFuzzer measures its own peak memory, and a direct child would inherit
    # the peak of this process.
    return subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, *program, *options, str(seeds)],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds + 60,
    )  # fmt: skip


def test_decoders_survive_guided_fuzzing(tmp_path: Path) -> None:
    needs_atheris()
    done = fuzz(tmp_path, "-m", "tests.fuzz.fuzz_wire", seconds=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    assert runs is not None, done.stderr[-500:]
    assert int(runs.group(1)) > 1000


def test_target_fails_on_any_exception_but_wire_error(tmp_path: Path) -> None:
    needs_atheris()
    done = fuzz(tmp_path, "-c", PLANTED, seconds=SECONDS)
    assert done.returncode != 0
    assert "planted" in done.stdout + done.stderr
