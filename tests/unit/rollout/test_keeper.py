"""Processes that user code has started, however they were detached, end when the code's process ends or the service is
killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.rollout.rewards.pool import RewardPool
from shared.sample import Sample
from shared.topology.reward import RewardRetry
from tests.unit.rollout.reward_rig import Line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STARTERS = """
import ctypes, os, subprocess, sys, time

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def starts(sample):
    made = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid]
    told, tell = os.pipe()
    if not os.fork():                      # a daemon: its parent is gone at once
        os.setsid()
        if not os.fork():
            os.write(tell, str(os.getpid()).encode())
            os.execv(sys.executable, SLEEP)
        os._exit(0)
    os.wait()
    made.append(int(os.read(told, 100)))
    with open("pids.new", "w") as file:
        file.write(" ".join(map(str, made)))
    os.rename("pids.new", "pids")
    if sample.completion == "crash":
        ctypes.string_at(0)
    while sample.completion == "hang":
        time.sleep(1)
    return 1.0
"""
SERVICE = """
import asyncio
from tests.unit.rollout.test_keeper import score_one
asyncio.run(score_one("hang", 600.0))
"""


async def score_one(completion: str, timeout_s: float) -> str:
    """Return the kind of failure of one sample, scored by a pool that is then closed."""
    pool = RewardPool(
        [Line("my_starters:starts")],
        timeout_s=timeout_s,
        memory_bytes=256 << 20,
        processes=1,
        retry=RewardRetry(),
        emit=lambda topic, values: None,
    )
    await pool.start()
    try:
        (((score,),),) = (await pool.score([[Sample("train/0/0", {}, [], completion, [1], "stop")]], lambda: None),)
        if score.kind:  # The pool is still open.
            check_gone()
        return score.kind
    finally:
        await pool.close()


def check_gone() -> None:
    pids = [int(each) for each in Path("pids").read_text().split()]
    assert len(pids) == 3
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_starters.py").write_text(STARTERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("completion", "kind"), [("hang", "timeout"), ("crash", "crashed"), ("fine", "")])
def test_processes_that_a_function_started_end_when_its_process_ends(folder: Path, completion: str, kind: str) -> None:
    assert asyncio.run(score_one(completion, 1.0)) == kind
    check_gone()


def test_processes_that_a_function_started_end_when_the_service_is_killed(folder: Path) -> None:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    service = subprocess.Popen([sys.executable, "-c", SERVICE], env={**os.environ, "PYTHONPATH": path})
    try:
        while not (folder / "pids").exists():
            assert service.poll() is None
            time.sleep(0.02)
        below = psutil.Process(service.pid).children(recursive=True)
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait()
    check_gone()
    assert not psutil.wait_procs(below, timeout=20)[1]
