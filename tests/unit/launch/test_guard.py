"""The guard as a process: it limits the files to which processes print, and ends them when the launcher is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.processes.programs import ROOT
from shared.bounded_file import HEAD_BYTES, LIMIT_BYTES, head_of

pytestmark = pytest.mark.slow

FLOOD = "trap '' TERM; while :; do head -c 1000000 /dev/zero; done"


def test_outputs_stay_within_their_limit_even_after_the_launcher_was_killed(tmp_path: Path) -> None:
    """`/bin/sh` stands for a service that ignores SIGTERM, and its children for programs that users' code starts."""
    output = tmp_path / "rollout-0.out"
    (tmp_path / "sockets").mkdir()
    guard = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", "launch.processes.guard", str(tmp_path / "sockets"), str(tmp_path)],
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )
    with output.open("ab") as file:
        service = subprocess.Popen(["/bin/sh", "-c", FLOOD], stdout=file, process_group=0)
    try:
        assert guard.stdin is not None
        guard.stdin.write(b"+%d 2.0\n" % service.pid)
        guard.stdin.flush()
        wait_for_cut(output)
        guard.stdin.close()  # as when the launcher is killed
        before = dropped(output)
        time.sleep(1.0)
        assert dropped(output) > before, "the guard no longer limits the output"
        assert guard.wait(20) == 0
        assert service.wait(20) == -signal.SIGKILL
    finally:
        service.kill()
        guard.kill()
    assert LIMIT_BYTES // 2 - HEAD_BYTES <= output.stat().st_size <= LIMIT_BYTES
    assert not (tmp_path / "sockets").exists()


def wait_for_cut(output: Path) -> None:
    until = time.monotonic() + 20
    while not dropped(output):
        assert time.monotonic() < until, "not cut in time"
        time.sleep(0.05)


def dropped(output: Path) -> int:
    with output.open("rb") as file:
        return head_of(file.fileno()).dropped_bytes
