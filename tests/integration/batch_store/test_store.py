"""The batch store and its data plane, with a real store process, real files and a real bus."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from proto import dtypes
from proto.errors import WireError
from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    GetInventory,
    GetStoreStats,
    Inventory,
    Locate,
    Located,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    StoreStats,
    TaskHandle,
)
from proto.tensors import Array
from services.batch_store.room import held_bytes
from services.batch_store.state import GRANT_S
from shared.actor.service import UNUSABLE_STATUS
from shared.batch import Batch, BatchStatus
from shared.dataplane.client import Receipt, TaskShards
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.store_process import REPOSITORY, STORE, Peer, StoreProcess, ending, make_run, peer_of

CALL_S = 10.0
MEMORY = 16 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with ending(StoreProcess(make_run(tmp_path, memory=MEMORY))) as process:
        process.start()
        yield process


def block(first: int, count: int, size: int = 100, fence: int = 1) -> list[TaskShards]:
    return [
        TaskShards(f"train/0/{i}", fence, {"a": np.full(size, i, np.int32), "b": np.full((2, size), -i, np.float64)})
        for i in range(first, first + count)
    ]


def meta_of(tasks: Sequence[TaskShards], keys: Sequence[str] = ("a", "b")) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", list(keys))], stores=[STORE])


def named(tasks: Sequence[TaskShards]) -> list[PutTask]:
    return [PutTask(task.task_id, task.fence) for task in tasks]


async def clear(peer: Peer, tasks: Sequence[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=named(tasks)), Ack, deadline_s=CALL_S)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)


async def put(peer: Peer, tasks: Sequence[TaskShards], deadline_s: float = CALL_S) -> list[Receipt]:
    return await peer.data.put(tasks, store=STORE, deadline_s=deadline_s)


async def fetch(peer: Peer, tasks: Sequence[TaskShards], keys: Sequence[str] = ("a", "b")) -> list[dict[str, Array]]:
    return await peer.data.fetch(meta_of(tasks, keys), keys, deadline_s=CALL_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def files(run: RunDir, ending: str) -> list[Path]:
    return sorted((run.shm / "batch-store-0").glob(f"*.{ending}"))


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


def test_batch_fetches_keys_of_several_puts_and_missing_ones_are_named(store: StoreProcess) -> None:
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


def test_nested_shards_come_back_by_path_and_go_with_their_task(store: StoreProcess) -> None:
    """Each leaf of a structure has a path; empty arrays and scalars are shards, other values are refused by name."""
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


def test_writing_to_a_fetched_array_changes_no_other_readers_array(store: StoreProcess) -> None:
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


def test_collected_task_stays_valid_where_it_is_mapped_and_its_bytes_count_until_then(store: StoreProcess) -> None:
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
                store.kill()  # a restarted store must also count bytes that are still mapped
                store.start()
            one = held[2]["b"][0]  # a view of a view of the mapping
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
                assert caught.value.code == ErrorCode.COLLECTED  # its file still exists for task 1
                assert (await stats(peer)).shards == 2
                store.kill()
                store.start()
            await put(peer, block(0, 1, fence=6))
            assert int((await fetch(peer, block(0, 1, fence=6)))[0]["a"][0]) == 0

    asyncio.run(main())


def test_same_bytes_again_are_one_put_and_other_bytes_are_a_conflict(store: StoreProcess) -> None:
    tasks = block(3, 2)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            first = await put(peer, tasks)
            before = await stats(peer)
            assert await put(peer, tasks) == first
            after = await stats(peer)
            assert (after.bytes, after.shards, after.puts) == (before.bytes, before.shards, before.puts)
            with pytest.raises(RpcError, match=r"train/0/4#a is sealed under fence 1 with other bytes") as caught:
                await put(peer, [TaskShards("train/0/4", 1, {"a": np.zeros(3)})])
            assert caught.value.code == ErrorCode.CONFLICT
            assert (await stats(peer)).bytes == before.bytes
            await put(peer, [TaskShards("train/0/4", 2, {"a": np.zeros(3)})])

    asyncio.run(main())


def test_sealing_twice_is_one_seal_and_an_unwritten_file_is_refused(store: StoreProcess) -> None:
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


def test_readers_that_race_with_clear_get_whole_tasks_or_collected(store: StoreProcess) -> None:
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
            gc.collect()  # tracebacks of the errors above hold frames, which hold the arrays
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
            ours = [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == where]
            assert len(ours) == 1  # mmap's duplicate
            os.close(int(ours[0]))
            await clear(peer, tasks)
            assert (await stats(peer)).zombie_bytes > 0
            assert int(held[0]["a"][0]) == 0
            os.open(os.devnull, os.O_RDONLY)  # reuse the number, because the mapping closes it at its end
            del held
            assert (await stats(peer)).zombie_bytes == 0

    asyncio.run(main())


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_batch_of_more_files_than_the_usual_descriptor_limit_can_be_mapped_and_cleared(store: StoreProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = block(0, 1500, size=4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    async def main() -> None:
        async with peer_of(store.run) as peer:  # raises the soft limit again
            for first in range(0, len(tasks), 100):
                await asyncio.gather(*(put(peer, [task]) for task in tasks[first : first + 100]))
            found = await fetch(peer, tasks)
            assert [int(each["a"][0]) for each in found] == list(range(1500))
            assert store.process is not None
            open_ones = len(os.listdir(f"/proc/{store.process.pid}/fd"))
            resource.prlimit(store.process.pid, resource.RLIMIT_NOFILE, (open_ones + 40, hard))
            await clear(peer, tasks[:500])  # all are mapped and use up the free descriptors
            await clear(peer, tasks[500:])
            assert (await stats(peer)).tasks == 0
            assert (await stats(peer)).zombie_bytes == (await stats(peer)).bytes > 0
            found.clear()
            gc.collect()
            assert (await stats(peer)).bytes == 0
            assert files(store.run, "blk") == files(store.run, "dead") == []

    try:
        asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_cancelled_put_gives_its_room_back(store: StoreProcess) -> None:
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


def test_shared_memory_too_small_for_the_limit_is_refused_at_start(tmp_path: Path) -> None:
    process = StoreProcess(make_run(tmp_path, memory=1 << 50))
    process.start()
    assert process.process is not None
    try:
        _, errors = process.process.communicate(timeout=30)
        assert process.process.returncode == UNUSABLE_STATUS
        assert b"services.batch-store.memory is 1125899906842624 bytes, /dev/shm has room for" in errors
        assert b"--shm-size" in errors
    finally:
        process.run.remove_volatile()


def test_second_store_of_the_same_instance_is_refused(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 1))

    asyncio.run(main())
    twin = StoreProcess(store.run)
    twin.start()
    assert twin.process is not None
    _, errors = twin.process.communicate(timeout=30)
    assert twin.process.returncode == 1
    assert b"in use by a live process" in errors or b"served by another process" in errors


def test_stop_with_the_run_alive_keeps_the_shards(store: StoreProcess) -> None:
    tasks = block(0, 2)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, tasks)
            assert store.stop() == 0
            store.start()
            assert len(await fetch(peer, tasks)) == 2

    asyncio.run(main())


def test_store_whose_supervisor_died_removes_the_shared_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, memory=MEMORY)
    script = """
import subprocess, sys
store = subprocess.Popen([sys.executable, "-m", "services.batch_store", "--run", sys.argv[1],
                          "--supervisor", "ipc://" + sys.argv[2]])
print(store.pid, flush=True)
store.wait()
"""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", script, str(run.path), str(run.sockets / "supervisor-0")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())

    async def main() -> None:
        async with peer_of(run) as peer:
            await put(peer, block(0, 1))
            assert files(run, "blk")
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait(10)
            await until(lambda: not run.shm.exists())

    try:
        asyncio.run(main())
    finally:
        supervisor.stdout.close()
        if run.shm.exists():
            os.kill(pid, signal.SIGKILL)
        run.remove_volatile()


def test_reader_and_store_agree_where_a_file_lies(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 2))
            located = await peer.store.call(Locate(tasks=named(block(0, 2))), Located, deadline_s=CALL_S)
            assert located.files == [str(path) for path in files(store.run, "blk")]
            assert located.places == [[0], [0]]

    asyncio.run(main())
