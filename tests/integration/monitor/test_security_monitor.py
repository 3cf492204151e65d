"""Tests that a second monitor of a run is refused and that the first one keeps its stream."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from shared.rundir import RunDir
from shared.stream import Stream
from tests.integration.tiny.harness import ROOT, environment


def start(run: RunDir) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.monitor", "--run", str(run.path)],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_second_monitor_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")

    async def first_row() -> None:
        async with asyncio.timeout(20), Stream(run, ended=lambda: False) as stream:
            async for _ in stream.rows():
                return

    first = start(run)
    try:
        asyncio.run(first_row())
        stream = run.socket_file("monitor-pub", 0)
        before = stream.stat()
        second = start(run)
        _, said = second.communicate(timeout=30)
        assert second.returncode == 1
        assert "in use by a live process" in said
        assert stream.stat().st_ino == before.st_ino
        asyncio.run(first_row())
    finally:
        first.kill()
        first.communicate(timeout=10)
        run.remove_volatile()
