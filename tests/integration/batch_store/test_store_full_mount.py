"""Tests that, when something else has filled the shared-memory mount or the store has no free descriptor, puts wait and
then fail with the cause, and clearing still makes room.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proto.messages import (
    Ack,
    Clear,
    ErrorCode,
    GetStorePlace,
    GetStoreStats,
    OpenStream,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    StorePlace,
    StoreStats,
    StreamOpened,
)
from proto.registry import Message, Request
from proto.tensors import Buffer
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.store_process import STORE, Peer, StoreProcess, fill, make_run, peer_of, small_mount

MOUNT_BYTES = 8 << 20
MEMORY = 6 << 20


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mount"
    yield from small_mount(folder, MOUNT_BYTES)


async def busy(peer: Peer) -> int:
    """Return the number of times that the store has made producers wait."""
    stats: StoreStats = await peer.store.call(GetStoreStats(), StoreStats, deadline_s=10)
    return stats.busy


def test_requests_are_refused_as_busy_while_the_store_has_no_free_descriptor(tmp_path: Path) -> None:
    store = StoreProcess(make_run(tmp_path, memory=MEMORY))
    store.start()
    assert store.process is not None
    pid = store.process.pid

    def limit(soft: int | None) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if soft is None else soft, hard))

    async def refused(peer: Peer, request: Request, reply: type[Message]) -> None:
        with pytest.raises(RpcError, match="ulimit -n") as caught:
            await peer.store.call(request, reply, deadline_s=10)
        assert caught.value.code == ErrorCode.BUSY

    def task(number: int) -> TaskShards:
        return TaskShards(f"t/0/{number}", 1, {"a": np.full(1 << 18, number, np.uint8)})

    async def main() -> None:
        async with peer_of(store.run) as peer:
            begun = PutBegin(put_id="a" * 32, nbytes=1 << 18, tasks=[PutTask("t/0/8", 1)])
            await peer.store.call(begun, PutGrant, deadline_s=10)
            await peer.data.put([task(0)], store=STORE, deadline_s=10)
            await peer.data.put([task(1)], store=STORE, deadline_s=10)
            await peer.store.call(Clear(tasks=[PutTask("t/0/0", 1)]), Ack, deadline_s=10)  # This leaves a spare.
            taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
            limit(next(number for number in range(len(taken) + 1) if number not in taken))
            begin = PutBegin(put_id="b" * 32, nbytes=1 << 18, tasks=[PutTask("t/0/9", 1)])
            await refused(peer, begin, PutGrant)  # A spare fits this put.
            await refused(peer, msgspec.structs.replace(begin, nbytes=1 << 13), PutGrant)  # No spare fits this one.
            await refused(peer, PutSeal(put_id=begun.put_id), PutSealed)
            await refused(peer, GetStorePlace(), StorePlace)
            await refused(peer, OpenStream(line_id="", tasks=[PutTask("t/0/1", 1)]), StreamOpened)
            before = await busy(peer)
            waiting = asyncio.ensure_future(peer.data.put([task(2)], store=STORE, deadline_s=20))
            while await busy(peer) < before + 2:
                await asyncio.sleep(0.01)
            limit(None)
            await waiting
            assert store.process is not None
            assert store.process.poll() is None

    try:
        asyncio.run(main())
    finally:
        store.kill()
        store.run.remove_volatile()


def test_puts_into_a_full_mount_wait_and_then_name_it_and_a_clear_makes_room(mount: Path, tmp_path: Path) -> None:
    first, second, third = (
        [TaskShards(f"t/0/{i}", 1, {"a": np.full(nbytes, i, np.uint8)})]
        for i, nbytes in ((1, 2 << 20), (2, 2 << 20), (3, 3 << 20))
    )
    fourth, fifth = ([TaskShards(f"t/0/{i}", 1, {"a": np.zeros(9)})] for i in (4, 5))
    store = StoreProcess(make_run(tmp_path, memory=MEMORY, shm_root=mount))
    store.start()
    junk = mount / "junk"

    def use_up_the_inodes() -> list[Path]:
        made: list[Path] = []
        while True:
            try:
                (mount / f"file-{len(made)}").touch()
            except OSError:
                return made
            made.append(mount / f"file-{len(made)}")

    async def quota_used_up(peer: Peer) -> None:
        """Simulate the kernel's quota error; real quotas need a file system and privileges that tests lack."""
        before = await busy(peer)
        refused = [OSError(errno.EDQUOT, "Disk quota exceeded")] * 3
        writes = os.pwritev

        def pwritev(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            if refused:
                raise refused.pop()
            return writes(descriptor, buffers, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            with pytest.raises(RpcError, match="quota") as caught:
                await peer.data.put(fifth, store=STORE, deadline_s=0.8)
            assert caught.value.code == ErrorCode.BUSY
            await peer.data.put(fifth, store=STORE, deadline_s=10)
        assert await busy(peer) == before + 3

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(first, store=STORE, deadline_s=10)
            fill(junk)
            with pytest.raises(RpcError, match="enlarge it") as caught:
                await peer.data.put(second, store=STORE, deadline_s=1)
            assert caught.value.code == ErrorCode.BUSY
            assert await busy(peer) >= 2  # The put was tried at once and again half a second later.
            await peer.store.call(Clear(tasks=[PutTask("t/0/1", 1)]), Ack, deadline_s=10)
            with pytest.raises(RpcError) as caught:
                await peer.data.put(first, store=STORE, deadline_s=5)
            assert caught.value.code == ErrorCode.COLLECTED
            fill(junk)
            await peer.data.put(second, store=STORE, deadline_s=5)  # The put reuses the pages of the first one.
            await peer.store.call(Clear(tasks=[PutTask("t/0/2", 1)]), Ack, deadline_s=10)
            before = await busy(peer)
            # This put needs more room.
            waiting = asyncio.ensure_future(peer.data.put(third, store=STORE, deadline_s=20))
            while await busy(peer) == before:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            junk.unlink()
            await waiting
            stats = await peer.store.call(GetStoreStats(), StoreStats, deadline_s=10)
            assert stats.bytes <= MEMORY
            assert stats.shards == 1
            files = use_up_the_inodes()
            before = await busy(peer)
            with pytest.raises(RpcError, match="no room for another file") as caught:
                await peer.data.put(fourth, store=STORE, deadline_s=1)
            assert caught.value.code == ErrorCode.BUSY
            assert await busy(peer) > before
            for file in files:
                file.unlink()
            await peer.data.put(fourth, store=STORE, deadline_s=10)
            await quota_used_up(peer)

    try:
        asyncio.run(main())
    finally:
        store.kill()
        store.run.remove_volatile()
