"""Tests that a store does not lose acknowledged data if it restarts or continues after something else has used up the
space."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    GetStorePlace,
    PutTask,
    StorePlace,
    TaskHandle,
)
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.store_process import STORE, Peer, StoreProcess, ending, fill, make_run, peer_of, small_mount

MIB = 1 << 20


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    yield from small_mount(tmp_path / "mount", 8 * MIB)


def shard(number: int, nbytes: int = MIB) -> TaskShards:
    return TaskShards(f"t/0/{number}", 1, {"a": np.full(nbytes, number, np.uint8)})


async def check(peer: Peer, numbers: list[int], nbytes: int = MIB) -> None:
    handles = [TaskHandle(f"t/0/{number}", 1, stores=[0]) for number in numbers]
    meta = BatchMeta(tasks=handles, parts=[BatchPart("s", ["a"])], stores=[STORE])
    found = await peer.data.fetch(meta, ["a"], deadline_s=10)
    for number, arrays in zip(numbers, found, strict=True):
        assert np.array_equal(arrays["a"], np.full(nbytes, number, np.uint8))


def with_peer(store: StoreProcess, body: Callable[[Peer], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), peer_of(store.run) as peer:
            await body(peer)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["memory", "spill"])
def test_a_store_restarted_on_a_mount_filled_by_others_serves_acknowledged_data(
    mount: Path, tmp_path: Path, where: str
) -> None:
    if where == "memory":
        run = make_run(tmp_path, memory=6 * MIB, shm_root=mount)
    else:
        run = make_run(tmp_path, memory=4 * MIB, spill=mount, spill_limit=6 * MIB)

    async def before(peer: Peer) -> None:
        for number in range(5):
            await peer.data.put([shard(number)], store=STORE, deadline_s=10)

    async def after(peer: Peer) -> None:
        await check(peer, list(range(5)))

    with ending(StoreProcess(run)) as store:
        store.start()
        with_peer(store, before)
        (mount / "junk").write_bytes(bytes(2 * MIB))
        store.kill()
        store.start()
        with_peer(store, after)


def test_puts_are_refused_as_busy_while_the_disk_of_the_run_directory_and_the_spill_folder_is_full(
    mount: Path, tmp_path: Path
) -> None:
    """The store cannot write its log, either."""
    (mount / "r").mkdir()
    run = make_run(mount / "r", memory=3 * MIB, shm_root=tmp_path, spill=mount / "spill", spill_limit=4 * MIB)

    async def body(peer: Peer) -> None:
        size = MIB - 8192
        for number in range(3):
            await peer.data.put([shard(number, size)], store=STORE, deadline_s=10)
        fill(mount / "junk")
        [log] = (run.path / "logs").glob("batch-store*")
        fill(log, 1)  # This fills the rest of the log's last page.
        for _ in range(2):
            with pytest.raises(RpcError) as caught:
                await peer.data.put([shard(3, size)], store=STORE, deadline_s=1.5)
            assert caught.value.code == ErrorCode.BUSY
        (mount / "junk").unlink()
        for number in (3, 4):
            await peer.data.put([shard(number, size)], store=STORE, deadline_s=10)
        await check(peer, list(range(5)), size)

    with ending(StoreProcess(run)) as store:
        store.start()
        with_peer(store, body)


@pytest.mark.parametrize(
    "task", [PutTask("x", 1), PutTask("a/0/0\nt/0/1", 1), PutTask("t/0/1", -3), PutTask("t/0/1", 1 << 63)]
)
def test_clear_of_an_invalid_task_is_refused_and_does_not_break_a_restart(tmp_path: Path, task: PutTask) -> None:
    async def before(peer: Peer) -> None:
        await peer.data.put([shard(1, 1000)], store=STORE, deadline_s=10)
        with pytest.raises(RpcError) as caught:
            await peer.store.call(Clear(tasks=[PutTask("t/0/9", 1), task]), Ack, deadline_s=10)
        assert caught.value.code == ErrorCode.BAD_REQUEST

    async def after(peer: Peer) -> None:
        await check(peer, [1], 1000)

    with ending(StoreProcess(make_run(tmp_path, memory=16 * MIB))) as store:
        store.start()
        with_peer(store, before)
        store.kill()
        store.start()
        with_peer(store, after)


@pytest.mark.parametrize("again", [True, False])
def test_task_cleared_on_a_full_mount_stays_cleared_after_a_kill(mount: Path, tmp_path: Path, again: bool) -> None:
    """If `again` is true, another task is cleared once there is room; otherwise the store catches up on its own."""
    tombstones = f"{STORE.replace('/', '-')}/tombstones"
    run = make_run(tmp_path, memory=6 * MIB, shm_root=mount)

    async def before(peer: Peer) -> None:
        await peer.data.put([shard(0, 1000), shard(1, 1000)], store=STORE, deadline_s=10)
        fill(mount / "junk")
        await peer.store.call(Clear(tasks=[PutTask("t/0/0", 1)]), Ack, deadline_s=10)
        assert (run.shm / tombstones).read_text() == ""
        (mount / "junk").unlink()
        if again:
            await peer.store.call(Clear(tasks=[PutTask("t/0/9", 1)]), Ack, deadline_s=10)
        async with asyncio.timeout(20):
            while "1 t/0/0\n" not in (run.shm / tombstones).read_text():
                assert not again
                await asyncio.sleep(0.05)

    async def after(peer: Peer) -> None:
        await check(peer, [1], 1000)
        with pytest.raises(RpcError) as caught:
            await check(peer, [0], 1000)
        assert caught.value.code == ErrorCode.COLLECTED
        with pytest.raises(RpcError) as caught:
            await peer.data.put([shard(0, 1000)], store=STORE, deadline_s=5)
        assert caught.value.code == ErrorCode.COLLECTED

    with ending(StoreProcess(run)) as store:
        store.start()
        with_peer(store, before)
        store.kill()
        store.start()
        with_peer(store, after)


def test_the_first_check_for_shared_memory_waits_for_room_on_a_full_mount(mount: Path, tmp_path: Path) -> None:
    async def body(peer: Peer) -> None:
        fill(mount / "junk")
        with pytest.raises(RpcError) as caught:
            await peer.store.call(GetStorePlace(), StorePlace, deadline_s=5)
        assert caught.value.code == ErrorCode.BUSY
        waiting = asyncio.ensure_future(peer.data.put([shard(0, 1000)], store=STORE, deadline_s=20))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        (mount / "junk").unlink()
        await waiting
        await check(peer, [0], 1000)

    with ending(StoreProcess(make_run(tmp_path, memory=6 * MIB, shm_root=mount))) as store:
        store.start()
        with_peer(store, body)
