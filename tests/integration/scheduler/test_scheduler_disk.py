"""Tests that a scheduler that cannot write its journal exits with a one-line error, and that it sends a decision only
after writing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from proto.messages import (
    Clear,
    GetRunInfo,
    Heartbeat,
    HeartbeatAck,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    RunInfo,
)
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call
from shared.rundir import RunDir
from tests.integration.scheduler.test_scheduler_service import TASKS_PER_STEP, TOPOLOGY, World, world_of
from tests.integration.store_process import REPOSITORY, fill, small_mount

MOUNT_BYTES = 4 << 20
MORE_BYTES = 24 << 10
"""Number of bytes by which a limited journal may still grow."""


def make_run(folder: Path, where: Path) -> RunDir:
    """Make a run with all files at `where`, except sockets and shared memory."""
    model = folder / "model"
    model.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    run = RunDir.create(where / "run", shm_root=folder / "shm")
    text = TOPOLOGY.format(steps=6, tasks=TASKS_PER_STEP, group=4).replace("./model", str(model))
    run.topology.write_text(text.replace("lease_s: 2", "lease_s: 600"))
    return run


def start(run: RunDir) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.scheduler", "--run", str(run.path)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE)


async def join(world: World) -> int:
    """Connect a driver that publishes a version, and a worker; return the worker's incarnation."""
    driving, driver = world.client()
    await driving.call(GetRunInfo(driver=driver), RunInfo, deadline_s=20)
    await world.publish(driving, driver, 0)
    client, life = world.client()
    await world.join("rollout", 0, client, life)
    return life


async def lease(world: World, life: int, most: int) -> list[int]:
    """Return the leases that the worker is granted until it has `most` of them or gets no reply."""
    client, _ = world.client()
    told: list[int] = []
    request = LeaseRequest(stage="rollout", service="rollout", instance=0, incarnation=life, max_tasks=1)
    with contextlib.suppress(RpcError):
        while len(told) < most:
            told.append((await client.call(request, LeaseGrant, deadline_s=3)).lease_id)
    return told


async def lost(world: World, life: int, leases: list[int]) -> list[int]:
    """Return the leases that a restarted scheduler does not know about."""
    client, _ = world.client()
    beat = Heartbeat(
        service="rollout",
        instance=0,
        incarnation=life,
        state="READY",
        leases=[LeaseProgress(each, 1) for each in leases],
    )
    ack = await client.call(beat, HeartbeatAck, deadline_s=20)
    assert ack.registered
    return list(ack.lost_leases)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    yield from small_mount(tmp_path / "mount", MOUNT_BYTES)


def ended(process: subprocess.Popen[bytes]) -> str:
    """Return the last line that a failed scheduler wrote to stderr."""
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    return errors.decode().splitlines()[-1]


def test_a_full_disk_causes_a_one_line_error_and_does_not_lose_a_lease(mount: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, mount)
    process = start(run)
    junk = mount / "junk"

    async def main() -> None:
        nonlocal process
        async with world_of(run) as world:
            life = await join(world)
            told = await lease(world, life, 3)
            assert len(told) == 3
            fill(junk)
            told += await lease(world, life, 100)
            line = await asyncio.to_thread(ended, process)
            assert line.startswith(f"scheduler/0: journal {run.journal}: cannot be written: database or disk is full; ")
            assert "make room" in line
            junk.unlink()
            process = start(run)
            assert await lost(world, life, told) == []

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.communicate()
        run.remove_volatile()


def test_a_scheduler_that_fails_while_a_store_hangs_still_exits(tmp_path: Path) -> None:
    """A clear that no store acknowledges is retried indefinitely but does not delay the scheduler's exit."""
    run = make_run(tmp_path, tmp_path)
    process = start(run)
    clears: list[int] = []

    def hang(request: Clear, call: Call) -> object:
        clears.append(len(request.tasks))
        return DEFERRED

    async def main() -> None:
        async with world_of(run) as world:
            world.store._handlers[Clear] = hang
            client, life = world.client()
            await world.join("batch-store", 0, client, life)
            first = await join(world)
            assert len(await lease(world, first, 3)) == 3
            client, second = world.client()
            await world.join("rollout", 0, client, second)  # The first worker's puts must now be cleared.
            async with asyncio.timeout(20):
                while not clears:
                    await asyncio.sleep(0.05)
            most = Path(f"{run.journal}-wal").stat().st_size + MORE_BYTES
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
            await lease(world, second, 100)
            line = await asyncio.to_thread(ended, process)
            assert line.startswith(f"scheduler/0: journal {run.journal}: cannot be written: disk I/O error; ")

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.communicate()
        run.remove_volatile()


def test_a_journal_that_cannot_grow_causes_a_one_line_error_and_does_not_lose_a_lease(tmp_path: Path) -> None:
    run = make_run(tmp_path, tmp_path)
    process = start(run)

    async def main() -> None:
        nonlocal process
        async with world_of(run) as world:
            life = await join(world)
            told = await lease(world, life, 1)
            most = Path(f"{run.journal}-wal").stat().st_size + MORE_BYTES
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
            told += await lease(world, life, 100)
            line = await asyncio.to_thread(ended, process)
            assert line.startswith(f"scheduler/0: journal {run.journal}: cannot be written: disk I/O error; ")
            process = start(run)
            assert await lost(world, life, told) == []

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.communicate()
        run.remove_volatile()
