"""Tests the batch store and its data plane with a real store process, real files and a real bus."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Sequence

import numpy as np
import pytest

from proto import dtypes
from proto.errors import WireError
from proto.messages import (
    BatchMeta,
    BatchPart,
    ErrorCode,
    GetInventory,
    Inventory,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    TaskHandle,
)
from proto.tensors import Array
from services.batch_store.room import held_bytes
from services.batch_store.state import GRANT_S
from shared.batch import Batch, BatchStatus
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.batch_store.blocks import (
    CALL_S,
    MEMORY,
    block,
    clear,
    descriptor_target,
    fetch,
    files,
    meta_of,
    put,
    stats,
)
from tests.integration.store_process import STORE, Peer, StoreProcess, peer_of


def test_every_dtype_and_shape_comes_back_byte_exact(store: StoreProcess) -> None:
    rng = np.random.default_rng(7)
    shards: dict[str, Array] = {}
    for row in dtypes.TABLE:
        for shape in ((), (0, 3), (5,), (2, 3)):
            raw = rng.integers(0, 2 if row.name == "bool" else 256, int(np.prod(shape)) * row.itemsize, np.uint8)
            shards[f"{row.name}/{len(shape)}{shape[:1]}".translate({40: 95, 41: 95, 44: 95})] = raw.view(
                row.numpy
            ).reshape(shape)
    shards["strided"] = rng.standard_normal((6, 8))[::2, 1::3]
    shards["big_endian"] = np.arange(5, dtype=">i4")
    task = TaskShards("train/0/0", 2, shards)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            [receipt] = await put(peer, [task])
            assert receipt.nbytes == sum(array.nbytes for array in shards.values())
            [found] = await fetch(peer, [task], list(shards))
            for key, array in shards.items():
                assert (found[key].dtype.newbyteorder("<"), found[key].shape) == (
                    array.dtype.newbyteorder("<"),
                    array.shape,
                )
                assert (
                    found[key].tobytes() == np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
                )
                assert found[key].flags.writeable
            [everything] = await peer.data.fetch(meta_of([task], []), [], deadline_s=CALL_S)
            assert list(everything) == list(shards)

    asyncio.run(main())


def test_a_batch_fetches_keys_of_several_puts_and_an_error_names_missing_ones(store: StoreProcess) -> None:
    tasks = block(0, 3)
    later = [TaskShards(task.task_id, task.fence, {"c": np.full(4, 9.0)}) for task in tasks[:2]]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks)
            await put(peer, later)
            handles = [TaskHandle(task.task_id, 1, stores=[0, 0]) for task in tasks]
            parts = [BatchPart("rollout", ["a", "b"]), BatchPart("reference", ["c"])]
            batch = Batch(BatchMeta(tasks=handles, parts=parts, stores=[STORE]), peer.data)
            assert batch.status is BatchStatus.REMOTE
            local = await batch.take([1, 0]).fetch(["c", "a"])
            assert [array.tolist() for array in local["c"]] == [[9.0] * 4] * 2
            assert [int(array[0]) for array in local["a"]] == [1, 0]
            with pytest.raises(RpcError, match=r"train/0/2#c") as caught:
                await batch.fetch()
            assert (caught.value.code, caught.value.names) == (ErrorCode.MISSING, ["train/0/2#c"])
            with pytest.raises(RpcError, match=r"train/0/7#a") as caught:
                await fetch(peer, block(6, 2))
            assert caught.value.names == ["train/0/6#a", "train/0/6#b", "train/0/7#a", "train/0/7#b"]
            with pytest.raises(RpcError) as caught:
                await fetch(peer, block(0, 1, fence=2))
            assert caught.value.code == ErrorCode.MISSING

    asyncio.run(main())


def test_nested_shards_come_back_by_path_and_are_collected_with_their_task(store: StoreProcess) -> None:
    """Each leaf of a structure has a path. Empty arrays and scalars are shards. Any other value is refused with an
    error that names its path and type.
    """
    turns = {
        "turn/0/ids": np.arange(3),
        "turn/0/score": np.float32(0.5).reshape(()),
        "turn/1/ids": np.zeros(0, np.int64),
    }
    task = [TaskShards("train/0/0", 1, turns)]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            for wrong, name in ((None, "NoneType"), (np.array([None]), "object"), (np.array(["a"]), "<U1")):
                with pytest.raises(WireError, match=rf"train/0/0#turn/1/ids.*{name}"):
                    await put(peer, [TaskShards("train/0/0", 1, {**turns, "turn/1/ids": wrong})])  # type: ignore[dict-item]
            assert (await stats(peer)).bytes == 0
            await put(peer, task)
            assert (await stats(peer)).shards == 3
            [found] = await fetch(peer, task, list(turns))
            assert all(found[key].tobytes() == array.tobytes() for key, array in turns.items())
            assert all(found[key].shape == array.shape for key, array in turns.items())
            with pytest.raises(RpcError, match=r"train/0/0#turn/2/ids") as caught:
                await fetch(peer, task, ["turn/0/ids", "turn/2/ids"])
            assert caught.value.names == ["train/0/0#turn/2/ids"]
            await clear(peer, task)
            now = await stats(peer)
            assert (now.shards, now.tasks, now.files, now.tombstones) == (0, 0, 0, 1)

    asyncio.run(main())


def test_writing_to_a_fetched_array_does_not_change_the_arrays_of_other_readers(store: StoreProcess) -> None:
    tasks = block(1, 1)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks)
            [first] = await fetch(peer, tasks)
            [second] = await fetch(peer, tasks)
            first["a"][:] = 77
            [third] = await fetch(peer, tasks)
            assert second["a"][0] == third["a"][0] == 1
            assert first["b"][0, 0] == -1

    asyncio.run(main())


def test_a_collected_task_stays_valid_and_its_bytes_count_as_long_as_it_is_mapped(store: StoreProcess) -> None:
    tasks = block(0, 4)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks)
            held = await fetch(peer, tasks)
            whole = (await stats(peer)).bytes
            await clear(peer, tasks[:3])
            assert (await stats(peer)).bytes == whole
            assert (await stats(peer)).shards == 2
            await clear(peer, tasks[3:])
            for _ in range(2):
                now = await stats(peer)
                assert (now.bytes, now.zombie_bytes, now.shards, now.files) == (whole, whole, 0, 0)
                assert [int(each["a"][0]) for each in held] == [0, 1, 2, 3]
                store.kill()  # A restarted store must also count bytes that are still mapped.
                store.start()
            one = held[2]["b"][0]  # This is a view of a view of the mapping.
            del held
            assert (await stats(peer)).zombie_bytes == whole
            del one
            assert (await stats(peer)).bytes == 0
            assert files(store.run, "dead") == []

    asyncio.run(main())


def test_late_put_to_a_tombstoned_task_is_refused_before_and_after_a_restart(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 2, fence=4))
            await clear(peer, block(0, 1, fence=5))
            for _ in range(2):
                with pytest.raises(RpcError, match="collected") as caught:
                    await put(peer, block(0, 2, fence=5))
                assert (caught.value.code, caught.value.names) == (ErrorCode.COLLECTED, ["train/0/0"])
                with pytest.raises(RpcError) as caught:
                    await fetch(peer, block(0, 2, fence=4))
                assert caught.value.code == ErrorCode.COLLECTED  # The task's file still exists, because of task 1.
                assert (await stats(peer)).shards == 2
                store.kill()
                store.start()
            await put(peer, block(0, 1, fence=6))
            assert int((await fetch(peer, block(0, 1, fence=6)))[0]["a"][0]) == 0

    asyncio.run(main())


def test_a_repeated_put_counts_once_and_different_bytes_are_a_conflict(store: StoreProcess) -> None:
    tasks = block(3, 2)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            first = await put(peer, tasks)
            before = await stats(peer)
            assert await put(peer, tasks) == first
            after = await stats(peer)
            assert (after.bytes, after.shards, after.puts) == (before.bytes, before.shards, before.puts)
            with pytest.raises(RpcError, match=r"train/0/4#a is sealed under fence 1 with different bytes") as caught:
                await put(peer, [TaskShards("train/0/4", 1, {"a": np.zeros(3)})])
            assert caught.value.code == ErrorCode.CONFLICT
            assert (await stats(peer)).bytes == before.bytes
            await put(peer, [TaskShards("train/0/4", 2, {"a": np.zeros(3)})])

    asyncio.run(main())


def test_a_repeated_seal_counts_once_and_an_unwritten_file_is_refused(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 1))
            [path] = files(store.run, "blk")
            sealed = PutSeal(put_id=path.stem)
            for _ in range(2):
                answer = await peer.store.call(sealed, PutSealed, deadline_s=CALL_S)
                assert answer.nbytes == path.stat().st_size
            put_id = secrets.token_hex(16)
            begin = PutBegin(put_id=put_id, nbytes=5000, tasks=[PutTask("train/0/9", 1)])
            grant = await peer.store.call(begin, PutGrant, deadline_s=CALL_S)
            assert (await peer.store.call(begin, PutGrant, deadline_s=CALL_S)) == grant
            assert os.stat(grant.path).st_size == 5000
            assert os.stat(grant.path).st_mode & 0o777 == 0o600
            with pytest.raises(RpcError, match="magic") as caught:
                await peer.store.call(PutSeal(put_id=put_id), PutSealed, deadline_s=CALL_S)
            assert caught.value.code == ErrorCode.BAD_REQUEST
            assert files(store.run, "tmp") == []
            for wrong in ("../../etc/passwd", "A" * 32, ""):
                with pytest.raises(RpcError, match="32 hexadecimal"):
                    await peer.store.call(
                        PutBegin(put_id=wrong, nbytes=5000, tasks=begin.tasks), PutGrant, deadline_s=CALL_S
                    )

    asyncio.run(main())


def test_busy_put_waits_for_room_until_its_deadline(store: StoreProcess) -> None:
    size = (MEMORY // 2 - 8192) // 20
    tasks = [block(i, 1, size=size) for i in range(3)]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks[0])
            await put(peer, tasks[1])
            with pytest.raises(RpcError, match="in use") as caught:
                await put(peer, tasks[2], deadline_s=0.7)
            assert caught.value.code == ErrorCode.BUSY
            assert caught.value.retry_after_s > 0
            waiting = asyncio.ensure_future(put(peer, tasks[2]))
            while (await stats(peer)).busy < 6:
                assert (await stats(peer)).bytes <= MEMORY
                await asyncio.sleep(0.02)
            assert not waiting.done()
            await clear(peer, tasks[0])
            await waiting
            assert (await stats(peer)).bytes <= MEMORY
            with pytest.raises(RpcError, match="never fit") as caught:
                await put(peer, block(9, 1, size=MEMORY // 8))
            assert caught.value.code == ErrorCode.BAD_REQUEST

    asyncio.run(main())


def test_stats_and_inventory_are_exact(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 5))
            await put(peer, block(5, 2, fence=3))
            sizes = sum(held_bytes(path.stat().st_size) for path in files(store.run, "blk"))
            on_disk = sum(path.stat().st_blocks * 512 for path in files(store.run, "blk"))
            await clear(peer, block(1, 2))
            await clear(peer, block(1, 2))
            now = await stats(peer)
            assert (now.bytes, now.bytes) == (sizes, on_disk)
            assert (now.shards, now.tasks, now.files, now.puts, now.clears, now.tombstones) == (10, 5, 2, 2, 2, 2)
            assert now.limit_bytes == MEMORY
            page = await peer.store.call(GetInventory(), Inventory, deadline_s=CALL_S)
            assert page.cursor == 0
            assert sorted((task.task_id, task.fence) for task in page.tasks) == [
                ("train/0/0", 1),
                ("train/0/3", 1),
                ("train/0/4", 1),
                ("train/0/5", 3),
                ("train/0/6", 3),
            ]

    asyncio.run(main())


def test_readers_that_race_with_clear_get_whole_tasks_or_the_error_collected(store: StoreProcess) -> None:
    async def main() -> None:
        outcomes: set[str] = set()

        async def read(peer: Peer, tasks: Sequence[TaskShards]) -> None:
            while True:
                try:
                    found = await fetch(peer, tasks)
                except RpcError as error:
                    outcomes.add(error.code)
                    return
                outcomes.add("read")
                for task, arrays in zip(tasks, found, strict=True):
                    assert all(np.array_equal(arrays[key], shard) for key, shard in task.shards.items())

        async with peer_of(store.run) as peer, peer_of(store.run) as other:
            for round_ in range(20):
                tasks = block(round_ * 4, 4)
                await put(peer, tasks)
                readers = [asyncio.ensure_future(read(each, tasks)) for each in (peer, other, other)]
                await asyncio.sleep(0.002 * round_)
                await clear(peer, tasks)
                await asyncio.gather(*readers)
            assert outcomes == {"read", ErrorCode.COLLECTED}
            gc.collect()  # The tracebacks of the errors above refer to frames, and the frames refer to the arrays.
            assert (await stats(peer)).bytes == 0

    asyncio.run(main())


def test_mapping_keeps_its_lock_when_the_reader_closes_every_descriptor(store: StoreProcess) -> None:
    """The reader protocol depends on this: a lock belongs to the open file description, which a mapping keeps open."""
    tasks = block(0, 1)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks)
            held = await fetch(peer, tasks)
            where = str(files(store.run, "blk")[0])
            ours = [fd for fd in os.listdir("/proc/self/fd") if descriptor_target(fd) == where]
            assert len(ours) == 1  # This is mmap's duplicate of the descriptor.
            os.close(int(ours[0]))
            await clear(peer, tasks)
            assert (await stats(peer)).zombie_bytes > 0
            assert int(held[0]["a"][0]) == 0
            os.open(os.devnull, os.O_RDONLY)  # When the mapping is closed, it closes the descriptor with this number.
            del held
            assert (await stats(peer)).zombie_bytes == 0

    asyncio.run(main())


def test_a_cancelled_put_frees_its_room(store: StoreProcess) -> None:
    tasks = block(0, 1, size=300_000)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            work = asyncio.ensure_future(put(peer, tasks))
            while not files(store.run, "tmp"):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            async with asyncio.timeout(GRANT_S + 10):
                while (await stats(peer)).bytes:
                    await asyncio.sleep(0.05)

    asyncio.run(main())
