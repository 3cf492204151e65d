"""Tests a store whose spill folder is shared with other runs and hosts, loses files, or is on a full disk."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.messages import (
    ErrorCode,
    Locate,
    Located,
    PutTask,
)
from shared.actor.service import UNUSABLE_STATUS
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, folder_id
from tests.integration.batch_store.full_store import MEMORY, MIB, SPILL, check, clear, places, put, served, shard, stats
from tests.integration.store_process import StoreProcess, make_run, small_mount


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, memory=MEMORY, spill=tmp_path / "spill", spill_limit=SPILL)


def test_a_directory_can_replace_shared_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, memory=MEMORY, shm_root=tmp_path / "folder")

    async def main() -> None:
        async with served(run) as (store, peer):
            tasks = [shard(i) for i in range(3)]
            for task in tasks:
                await put(peer, task)
            assert len(list((tmp_path / "folder").rglob("*.blk"))) == 3
            store.kill()
            store.start()
            await check(peer, tasks)

    asyncio.run(main())
    assert not list((tmp_path / "folder").iterdir())


def test_the_next_store_deletes_files_spilled_by_a_dead_run_of_this_host(tmp_path: Path, run: RunDir) -> None:
    spill, here = tmp_path / "spill", folder_id(run.shm.parent)
    owners = {
        "rlbus-dead": here,
        "rlbus-other-host": here.replace(here[:8], "01234567"),
        "rlbus-other-container": here.rpartition("/")[0] + "/fffff",
    }
    for name, owner in owners.items():
        (spill / name / "batch-store-0").mkdir(parents=True)
        (spill / name / "batch-store-0" / "shards.blk").write_bytes(b"x")
        (spill / name / "owner").write_text(owner)
    (spill / "something").mkdir()
    (spill / "file").touch()

    async def main() -> None:
        async with served(run) as (_, peer):
            await put(peer, shard(1))

    asyncio.run(main())
    left = ["file", "rlbus-other-container", "rlbus-other-host", "something"]  # The folder of the dead run is gone.
    assert sorted(path.name for path in spill.iterdir()) == left
    assert len(list(spill.rglob("*.blk"))) == 2


def test_two_hosts_that_share_a_spill_folder_leave_each_others_files_alone(tmp_path: Path) -> None:
    """Each host sees only its own shared memory, so the other run appears to be dead."""
    spill = tmp_path / "spill"
    for host in ("a", "b"):
        (tmp_path / host / "shm").mkdir(parents=True)
    (a, b) = (
        make_run(tmp_path / host, memory=MEMORY, shm_root=tmp_path / host / "shm", spill=spill, spill_limit=SPILL)
        for host in ("a", "b")
    )
    tasks = [shard(i) for i in range(6)]

    async def main() -> None:
        async with served(a) as (_, peer):
            for task in tasks:
                await put(peer, task)
            hidden = a.shm.rename(tmp_path / "hidden")
            async with served(b) as (_, other):
                await put(other, shard(1))
            hidden.rename(a.shm)
            assert await places(peer, tasks) == ["disk"] * 2 + ["memory"] * 4
            await check(peer, tasks)

    asyncio.run(main())


def test_shards_of_a_deleted_spilled_file_are_missing_and_the_store_continues(run: RunDir) -> None:
    tasks = [shard(i) for i in range(7)]

    async def main() -> None:
        async with served(run) as (store, peer):
            for task in tasks:
                await put(peer, task)
            located = await peer.store.call(Locate(tasks=[PutTask("train/0/0", 1)]), Located, deadline_s=10)
            os.unlink(located.files[0])
            with pytest.raises(RpcError, match="train/0/0#a") as caught:
                await check(peer, tasks)
            assert caught.value.code == ErrorCode.MISSING
            await check(peer, tasks[1:])
            now = await stats(peer)
            assert (now.bytes, now.shards, now.files, now.zombie_bytes) == (12 * MIB, 6, 6, 0)
            located = await peer.store.call(Locate(tasks=[PutTask("train/0/1", 1)]), Located, deadline_s=10)
            os.unlink(located.files[0])
            await clear(peer, tasks)
            gc.collect()
            now = await stats(peer)
            assert now.bytes == now.spare_bytes
            assert store.process is not None
            assert store.process.poll() is None
            await put(peer, shard(8))

    asyncio.run(main())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    yield from small_mount(folder, 8 * MIB)


def test_puts_are_refused_as_busy_on_a_full_disk_and_succeed_once_there_is_room_again(
    tmp_path: Path, small_disk: Path
) -> None:
    run = make_run(tmp_path, memory=MEMORY, spill=small_disk, spill_limit=6 * MIB)
    junk = small_disk / "junk"

    async def main() -> None:
        async with served(run) as (store, peer):
            tasks = [shard(i) for i in range(5)]
            for task in tasks[:4]:
                await put(peer, task)
            with junk.open("wb", buffering=0) as stream:
                stream.write(bytes(7 * MIB))
            with pytest.raises(RpcError) as caught:
                await put(peer, tasks[4], deadline_s=1)
            assert caught.value.code == ErrorCode.BUSY
            await check(peer, tasks[:4])
            waiting = asyncio.ensure_future(put(peer, tasks[4]))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            junk.unlink()
            await waiting
            await check(peer, tasks)
            assert "memory" in await places(peer, tasks)
            # This is more than the memory can hold, so one shard is on disk.
            assert (await stats(peer)).bytes == 10 * MIB
            assert store.process is not None
            assert store.process.poll() is None

    asyncio.run(main())
    assert not list(small_disk.rglob("*.blk"))


def test_a_disk_too_small_for_the_spill_limit_is_refused_at_start(tmp_path: Path, small_disk: Path) -> None:
    run = make_run(tmp_path, memory=MEMORY, spill=small_disk, spill_limit=9 * MIB)
    store = StoreProcess(run)
    store.start()
    assert store.process is not None
    try:
        _, errors = store.process.communicate(timeout=30)
    finally:
        run.remove_volatile()
    assert store.process.returncode == UNUSABLE_STATUS
    assert b"services.batch-store.spill_limit is 9437184 bytes" in errors
