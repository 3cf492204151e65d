"""Tests failed starts and early exits with a supervisor whose processes are one-line shell scripts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog
import zmq

from launch.processes.plan import Key, Resources
from launch.supervisor import runner, server
from launch.supervisor.events import Reported, RunEnded, RunOutcome
from launch.supervisor.server import Supervisor
from proto.ids import new_incarnation
from proto.messages import Ack, ErrorCode, KillInstance
from shared.actor import logging
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.runfiles.files import RunFiles

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
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[Key],
    program: str,
    scene: Callable[[Supervisor], Awaitable[None]],
    limit_s: float,
    start_limit_s: float = 600.0,
) -> RunEnded:
    monkeypatch.setattr(runner, "program_of", lambda service: ["/bin/sh", "-c", program])

    async def main() -> RunEnded:
        made = Supervisor(
            run,
            {key: Resources() for key in keys},
            start_limit_s=start_limit_s,
            on_event=lambda _: None,
        )
        ending = asyncio.create_task(made.run())
        try:
            await scene(made)
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(ending)
        finally:
            made.kill()
            await ending

    return asyncio.run(main())


def test_a_service_whose_log_file_cannot_be_opened_fails_the_run_with_its_cause(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(made: Supervisor) -> None:
        await asyncio.sleep(0.2)
        shutil.rmtree(run.logs)  # This simulates a disk that has become read-only or run out of inodes.

    ended = supervised(run, monkeypatch, [SCHEDULER], "sleep 0.5; kill -9 $$", scene, 60)
    assert ended.outcome == RunOutcome.FAILED


def test_a_service_that_is_not_ready_in_time_is_killed_and_started_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(_: Supervisor) -> None:
        """Leave the services alone."""

    ended = supervised(run, monkeypatch, [SCHEDULER], "sleep 60", scene, 60, start_limit_s=0.3)
    assert ended.outcome == RunOutcome.FAILED
    assert ended.cause == (
        "scheduler/0: not READY within 0.3 s of its start (run.start_limit_s) (death 4 in 300 s, limit 4)"
    )
    files = RunFiles(run.path)
    files.read_last()
    [last] = files.view.services(files.view.newest_at)
    assert (last.name, last.state, last.restarts) == ("scheduler/0", "FAILED", 3)
    assert ended.cause == f"scheduler/0: {last.cause}"


def test_a_driver_that_exits_on_a_signal_does_not_finish_the_run_even_if_the_scheduler_is_silent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STATUS_CALL_S", 0.5)
    lives: list[int] = []

    async def scene(made: Supervisor) -> None:
        await asyncio.sleep(0.3)
        made._feed(Reported(SCHEDULER, made.state.processes[SCHEDULER].pid, 1, "READY"))
        async with asyncio.timeout(20):
            while len(lives) < 2:  # The loop ends once the process is restarted.
                pid = made.state.processes[TRAINER].pid
                if pid and pid not in lives:
                    lives.append(pid)
                    if len(lives) == 1:
                        await asyncio.sleep(0.3)  # The shell needs time to set its trap.
                        os.kill(pid, signal.SIGTERM)
                await asyncio.sleep(0.05)
        made.stop("the test is over")

    program = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
    ended = supervised(run, monkeypatch, [SCHEDULER, TRAINER], program, scene, 30)
    assert ended.outcome != RunOutcome.DONE


def test_supervisor_confirms_the_death_of_only_its_own_processes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = []

    async def scene(made: Supervisor) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = Client(context, run.endpoint("supervisor", 0), "supervisor", new_incarnation())
        try:
            async with asyncio.timeout(20):
                while not made.state.processes[SCHEDULER].pid:
                    await asyncio.sleep(0.02)
            own = made.state.processes[SCHEDULER].pid
            for service, pid in ((SCHEDULER[0], own + 1), ("rollout", os.getpid()), (SCHEDULER[0], own)):
                ordered = KillInstance(service=service, instance=0, pid=pid, cause="test")
                try:
                    answers.append(await client.call(ordered, Ack, deadline_s=10))
                except RpcError as error:
                    answers.append(error.code)
            # The request is repeated for an incarnation that has ended.
            answers.append(await client.call(ordered, Ack, deadline_s=10))
        finally:
            client.close()
            await asyncio.to_thread(context.term)
        made.stop("the test is over")

    supervised(run, monkeypatch, [SCHEDULER], "sleep 60", scene, 60)
    assert answers == [ErrorCode.MISSING, ErrorCode.MISSING, Ack(), Ack()]
