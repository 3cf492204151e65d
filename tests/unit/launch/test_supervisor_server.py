"""A supervisor whose processes are one-line shell scripts: failed starts and early exits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog

from launch.supervisor import server
from launch.supervisor.events import Reported, RunEnded, RunOutcome
from launch.supervisor.plan import Key
from launch.supervisor.server import Supervisor
from shared.actor import logging
from shared.rundir import RunDir

pytestmark = pytest.mark.slow

SCHEDULER, TRAINER = ("scheduler", 0), ("policy-trainer", 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    made.hold()
    logging.configure(tmp_path / "supervisor.log")
    yield made
    made.remove_volatile()
    structlog.reset_defaults()


def supervised(
    run: RunDir, keys: list[Key], program: str, scene: Callable[[Supervisor], Awaitable[None]], limit_s: float
) -> RunEnded:
    async def main() -> RunEnded:
        made = Supervisor(run, keys, threads={}, on_event=lambda _: None, command=lambda _: ["/bin/sh", "-c", program])
        ending = asyncio.create_task(made.run())
        try:
            await scene(made)
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(ending)
        finally:
            made.kill()
            await ending

    return asyncio.run(main())


def test_a_service_whose_log_file_cannot_be_opened_fails_the_run_with_its_cause(run: RunDir) -> None:
    async def scene(made: Supervisor) -> None:
        await asyncio.sleep(0.2)
        shutil.rmtree(run.logs)  # simulates a disk that became read-only or ran out of inodes

    ended = supervised(run, [SCHEDULER], "sleep 0.5; kill -9 $$", scene, 60)
    assert ended.outcome == RunOutcome.FAILED


def test_a_driver_that_was_told_to_end_has_not_finished_its_run_though_the_scheduler_is_silent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "COMPLETE_CALL_S", 0.5)
    lives: list[int] = []

    async def scene(made: Supervisor) -> None:
        await asyncio.sleep(0.3)
        made._feed(Reported(SCHEDULER, made.state.processes[SCHEDULER].pid, 1, "READY"))
        async with asyncio.timeout(20):
            while len(lives) < 2:  # until the process is restarted
                pid = made.state.processes[TRAINER].pid
                if pid and pid not in lives:
                    lives.append(pid)
                    if len(lives) == 1:
                        await asyncio.sleep(0.3)  # the shell needs time to set its trap
                        os.kill(pid, signal.SIGTERM)
                await asyncio.sleep(0.05)
        made.stop("the test is over")

    program = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
    ended = supervised(run, [SCHEDULER, TRAINER], program, scene, 30)
    assert ended.outcome != RunOutcome.DONE
