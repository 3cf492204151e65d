"""Tests a real store through which the same shapes pass in every step: pages are reused, mapped data never changes,
spares make way for other files at once, and a store that is killed in the meantime starts clean.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proto.blockfile import parse
from proto.messages import (
    Ack,
    BatchMeta,
    Clear,
    ErrorCode,
    GetStoreStats,
    Ping,
    Pong,
    PutBegin,
    PutGrant,
    PutTask,
    StoreStats,
    TaskHandle,
)
from proto.tensors import Array
from services.batch_store.room import SPARE_BYTES, held_bytes
from shared.dataplane.client import TaskShards
from shared.dataplane.mapping import lock_named
from shared.rpc.errors import RpcError
from tests.descriptors import descriptors_left
from tests.integration.store_process import STORE, Peer, StoreProcess, ending, make_run, peer_of

ELEMENTS = SPARE_BYTES // 4 + 1000
MEMORY = 4 * SPARE_BYTES
CALL_S = 20.0


async def put(peer: Peer, task_id: str, values: Array) -> None:
    await peer.data.put([TaskShards(task_id, 1, {"w": values})], store=STORE, deadline_s=CALL_S)


async def fetch(peer: Peer, task_id: str) -> Array:
    meta = BatchMeta(tasks=[TaskHandle(task_id=task_id, fence=1, nbytes=0, stores=[0])], stores=[STORE])
    (found,) = await peer.data.fetch(meta, (), deadline_s=CALL_S)
    return found["w"]


async def clear(peer: Peer, task_id: str) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task_id, 1)]), Ack, deadline_s=CALL_S)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)


async def unmapped(peer: Peer) -> StoreStats:
    """Wait until no collected file is mapped. A thread that has fetched arrays releases them a moment after its caller
    does.
    """
    async with asyncio.timeout(CALL_S):
        while (found := await stats(peer)).zombie_bytes:
            await asyncio.sleep(0.01)
    return found


def inode(store: StoreProcess) -> int:
    """Return the inode of the only sealed file."""
    (path,) = (store.run.shm / "batch-store-0").glob("*.blk")
    return os.stat(path).st_ino


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with ending(StoreProcess(make_run(tmp_path, memory=MEMORY))) as process:
        process.start()
        yield process


@pytest.mark.parametrize("name", ["weights/0", "train/0"])
def test_pages_are_reused_and_mapped_data_does_not_change(store: StoreProcess, name: str) -> None:
    async def scenario() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, f"{name}/0", np.zeros(ELEMENTS, np.float32))
            first = inode(store)
            held = await fetch(peer, f"{name}/0")
            await clear(peer, f"{name}/0")
            await put(peer, f"{name}/1", np.ones(ELEMENTS, np.float32))
            second = inode(store)
            assert second != first  # The first file is still mapped, so its pages are not lent.
            assert not held.any()
            del held
            # From here on two files are enough; the last puts and fetches use mappings that were kept.
            for step in range(2, 6):
                await clear(peer, f"{name}/{step - 1}")
                await unmapped(peer)
                values = np.full(ELEMENTS + step % 3, step, np.float32)
                await put(peer, f"{name}/{step}", values)
                assert inode(store) in (first, second)
                found = await fetch(peer, f"{name}/{step}")
                assert np.array_equal(found, values)
                other = await fetch(peer, f"{name}/{step}")
                found[step::100] = -1  # This writes into the kept mapping.
                assert np.array_equal(other, values)
                del other
                assert np.array_equal(await fetch(peer, f"{name}/{step}"), values)
                del found
            now = await stats(peer)
            assert now.bytes <= MEMORY
            assert now.lent == 4

            await clear(peer, f"{name}/5")
            now = await unmapped(peer)
            assert now.bytes == now.spare_bytes > SPARE_BYTES
            large = np.arange(MEMORY // 4 - ELEMENTS, dtype=np.float32)
            await put(peer, "train/9/0", large)  # The put fits beside at most one spare.
            assert (await stats(peer)).bytes <= MEMORY
            assert np.array_equal(await fetch(peer, "train/9/0"), large)
            await clear(peer, "train/9/0")

    asyncio.run(scenario())


def test_client_without_descriptors_releases_its_kept_mappings_and_then_fails_with_the_cause(
    store: StoreProcess,
) -> None:
    values = np.arange(ELEMENTS, dtype=np.float32)

    async def keep_mappings(peer: Peer, step: int) -> None:
        """Keep one mapping for writing and one for reading, with two descriptors each."""
        await put(peer, f"train/0/{step}", values)
        assert np.array_equal(await fetch(peer, f"train/0/{step}"), values)
        await clear(peer, f"train/0/{step}")

    async def scenario() -> None:
        async with peer_of(store.run) as peer:
            for step in range(3):
                await keep_mappings(peer, step)
            with descriptors_left(0):
                await put(peer, "train/1/0", values)
            assert np.array_equal(await fetch(peer, "train/1/0"), values)
            with descriptors_left(0):
                assert np.array_equal(await fetch(peer, "train/1/0"), values)
            peer.data._write_mappings.close()
            peer.data._read_mappings.close()
            with descriptors_left(0):
                for attempt in (put(peer, "train/1/1", values), fetch(peer, "train/1/0")):
                    with pytest.raises(RpcError, match="ulimit -n") as caught:
                        await attempt
                    assert caught.value.code == ErrorCode.INTERNAL
            assert np.array_equal(await fetch(peer, "train/1/0"), values)
        async with peer_of(store.run) as new:
            await new.store.call(Ping(), Pong, deadline_s=CALL_S)
            with descriptors_left(0), pytest.raises(RpcError, match="ulimit -n"):
                await put(new, "train/1/2", values)
            await put(new, "train/1/2", values)  # The store was not mistaken for one on another host.

    asyncio.run(scenario())


def test_a_refused_put_is_not_lent_a_spare(store: StoreProcess) -> None:
    async def scenario() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, "train/0/0", np.zeros(MEMORY * 5 // 8, np.uint8))
            await put(peer, "train/0/1", np.zeros(MEMORY * 2 // 8, np.uint8))
            await clear(peer, "train/0/1")
            before = await stats(peer)
            assert before.spare_bytes > MEMORY * 2 // 8
            begin = PutBegin(put_id=secrets.token_hex(16), nbytes=MEMORY * 4 // 8, tasks=[PutTask("train/0/2", 1)])
            with pytest.raises(RpcError) as caught:
                await peer.store.call(begin, PutGrant, deadline_s=CALL_S)
            assert caught.value.code == ErrorCode.BUSY
            after = await stats(peer)
            assert (after.lent, after.spare_bytes, after.bytes) == (0, before.spare_bytes, before.bytes)
            await put(peer, "train/0/2", np.zeros(MEMORY * 2 // 8, np.uint8))
            assert (await stats(peer)).lent == 1

    asyncio.run(scenario())


def test_a_store_killed_while_a_spare_is_rewritten_never_serves_it(store: StoreProcess) -> None:
    old, new, kept = (np.full(ELEMENTS, value, np.float32) for value in (1, 2, 3))

    async def scenario() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, "train/0/0", kept)
            # Each value is the number of bytes that the producer has written.
            for half in (0, 4096, ELEMENTS * 2, ELEMENTS * 4):
                name = f"train/1/{half}"
                await put(peer, name, old)
                (path,) = {*(store.run.shm / "batch-store-0").glob("*.blk")} - sealed(store, "train/0/0")
                image, lent = path.read_bytes(), os.stat(path).st_ino
                await clear(peer, name)
                begin = PutBegin(put_id=secrets.token_hex(16), nbytes=len(image), tasks=[PutTask(name, 2)])
                grant = await peer.store.call(begin, PutGrant, deadline_s=CALL_S)
                assert os.stat(grant.path).st_ino == lent
                locked = lock_named(grant.path, os.O_RDWR)
                assert locked is not None
                rest = image[half:]  # The rest of the file still has the previous contents.
                assert os.pread(locked, len(rest), half) == (bytes(64) + rest[64:] if half == 0 else rest)
                os.pwrite(locked, new.tobytes()[:half], len(image) - new.nbytes)
                store.kill()
                store.start()
                now = await stats(peer)
                assert (now.files, now.tasks, now.spare_bytes) == (1, 1, 0)
                assert now.zombie_bytes == held_bytes(len(image))  # The producer has the file open.
                os.close(locked)
                now = await stats(peer)
                assert now.bytes == held_bytes(len(image))
                assert np.array_equal(await fetch(peer, "train/0/0"), kept)
                await put(peer, name.replace("1", "2", 1), new)
                assert np.array_equal(await fetch(peer, name.replace("1", "2", 1)), new)
                await clear(peer, name.replace("1", "2", 1))

    asyncio.run(scenario())


def sealed(store: StoreProcess, task_id: str) -> set[Path]:
    """Return the files that hold a task."""
    found = set()
    for path in (store.run.shm / "batch-store-0").glob("*.blk"):
        data = path.read_bytes()
        if task_id in parse(data, len(data)).task_ids:
            found.add(path)
    return found
