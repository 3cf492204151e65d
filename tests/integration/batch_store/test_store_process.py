"""Tests the store as a process: its descriptors and shared memory, how it starts and exits, and that a second process
is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from proto.messages import (
    Locate,
    Located,
)
from shared.actor.service import UNUSABLE_STATUS
from tests.integration.batch_store.blocks import (
    CALL_S,
    MEMORY,
    block,
    clear,
    fetch,
    files,
    named,
    put,
    stats,
    until,
)
from tests.integration.store_process import REPOSITORY, StoreProcess, make_run, peer_of


def test_batch_of_more_files_than_the_usual_descriptor_limit_can_be_mapped_and_cleared(store: StoreProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = block(0, 1500, size=4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    async def main() -> None:
        async with peer_of(store.run) as peer:  # This raises the soft limit again.
            for first in range(0, len(tasks), 100):
                await asyncio.gather(*(put(peer, [task]) for task in tasks[first : first + 100]))
            found = await fetch(peer, tasks)
            assert [int(each["a"][0]) for each in found] == list(range(1500))
            assert store.process is not None
            open_ones = len(os.listdir(f"/proc/{store.process.pid}/fd"))
            resource.prlimit(store.process.pid, resource.RLIMIT_NOFILE, (open_ones + 40, hard))
            await clear(peer, tasks[:500])  # All tasks are mapped and use up the free descriptors.
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


def test_a_store_whose_shared_memory_is_smaller_than_its_limit_is_refused_at_start(tmp_path: Path) -> None:
    process = StoreProcess(make_run(tmp_path, memory=1 << 50))
    process.start()
    assert process.process is not None
    try:
        _, errors = process.process.communicate(timeout=30)
        assert process.process.returncode == UNUSABLE_STATUS
        assert b"services.batch-store.memory is 1125899906842624 bytes, but /dev/shm has room for" in errors
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


def test_reader_and_store_agree_on_the_place_of_a_file(store: StoreProcess) -> None:
    async def main() -> None:
        async with peer_of(store.run) as peer:
            await put(peer, block(0, 2))
            located = await peer.store.call(Locate(tasks=named(block(0, 2))), Located, deadline_s=CALL_S)
            assert located.files == [str(path) for path in files(store.run, "blk")]
            assert located.places == [[0], [0]]

    asyncio.run(main())
