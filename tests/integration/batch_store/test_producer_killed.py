"""Tests that, if a producer dies during a put, the partial file is never visible, its space is reclaimed, and the next
put works."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from proto.messages import (
    Ack,
    BatchMeta,
    Clear,
    ErrorCode,
    GetInventory,
    GetStoreStats,
    Inventory,
    Locate,
    Located,
    PutTask,
    StoreStats,
    TaskHandle,
)
from services.batch_store.room import held_bytes
from services.batch_store.state import GRANT_S
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.store_process import REPOSITORY, STORE, Peer, StoreProcess, peer_of

ELEMENTS = 32 << 20
FILE = held_bytes(4 * ELEMENTS + 200)
MEMORY = 2 * FILE + (1 << 20)
CALL_S = 20.0
ROUNDS = 30
"""Maximum number of attempts. More than one may be needed, because a put may complete before it can be stopped."""


@dataclass
class Producer:
    """A process that puts tasks on command; `stop` and `kill` send it SIGSTOP and SIGKILL."""

    run: Path
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "tests.integration.batch_store.producer", str(self.run), str(ELEMENTS)]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def put(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")

    def sealed(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "sealed\n"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def producer(store: StoreProcess) -> Iterator[Producer]:
    made = Producer(store.run.path)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.kill()


def until(condition: Callable[[], bool], limit_s: float = CALL_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"


def grants(store: StoreProcess) -> set[Path]:
    return set((store.run.shm / "batch-store-0").glob("*.tmp"))


async def clear(peer: Peer, task_id: str, fence: int = 1) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task_id, fence)]), Ack, deadline_s=CALL_S)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)


def stopped_in_the_middle(store: StoreProcess, writer: Producer, number: int) -> bool:
    """Stop the put once an eighth of its bytes have been written. Return False if it had already completed."""
    before = grants(store)
    writer.put(number)
    until(lambda: bool(grants(store) - before))
    [path] = grants(store) - before
    with path.open("rb", buffering=0) as file:
        until(lambda: os.pread(file.fileno(), 4, ELEMENTS // 2) == number.to_bytes(4, "little"))
        writer.stop()
        if path.exists() and os.pread(file.fileno(), 4, 0) == bytes(4):  # The header is written last.
            return True
    writer.go_on()
    writer.sealed()
    return False


async def half_put(store: StoreProcess, peer: Peer, writer: Producer, *, lent: bool) -> int:
    """Stop a put midway and return its task number. If `lent` is true, the put writes into the pages of a collected
    file; otherwise, into new ones.
    """
    for number in range(1, ROUNDS):
        if not lent:
            await no_spares(peer)
        before = (await stats(peer)).lent
        stopped = await asyncio.to_thread(stopped_in_the_middle, store, writer, number + 1000 * lent)
        assert (await stats(peer)).lent == before + lent
        if stopped:
            return number + 1000 * lent
        await clear(peer, f"train/0/{number + 1000 * lent}")
    raise AssertionError(f"{ROUNDS} puts were over before they could be stopped")


async def no_spares(peer: Peer) -> None:
    """Evict all spares with a put that takes up all the space. The put is too large to become a spare itself."""
    if (await stats(peer)).spare_bytes:
        whole = TaskShards("train/9/0", int(time.monotonic() * 1000), {"w": np.zeros(2 * ELEMENTS, np.int32)})
        await peer.data.put([whole], store=STORE, deadline_s=CALL_S)
        await clear(peer, whole.task_id, whole.fence)


def test_partial_put_is_never_visible_and_its_space_is_reclaimed(store: StoreProcess) -> None:
    """One put goes into new pages, another into those of a collected file."""
    values = np.arange(2 * ELEMENTS, dtype=np.int32)  # The put needs the space held by both halves.

    async def main() -> None:
        async with peer_of(store.run) as peer:
            with producer(store) as into_new, producer(store) as into_lent:
                halves = [await half_put(store, peer, into_new, lent=False)]
                into_lent.put(1000)
                await asyncio.to_thread(into_lent.sealed)
                await clear(peer, "train/0/1000")
                halves.append(await half_put(store, peer, into_lent, lent=True))
                await asyncio.sleep(GRANT_S + 1.0)  # The grants expire within this time.
                assert await held(peer, halves) == []
                now = await stats(peer)
                # The producers are still alive, so their space is not reclaimed.
                assert (now.bytes, now.files, now.zombie_bytes) == (2 * FILE, 0, 0)
                for each in (into_new, into_lent):
                    each.kill()
                whole = TaskShards("train/1/0", 1, {"w": values})
                await peer.data.put([whole], store=STORE, deadline_s=CALL_S)
            assert await held(peer, halves) == [PutTask("train/1/0", 1)]
            meta = BatchMeta(tasks=[TaskHandle("train/1/0", 1, stores=[0])], stores=[STORE])
            [found] = await peer.data.fetch(meta, [], deadline_s=CALL_S)
            assert np.array_equal(found["w"], values)
            now = await stats(peer)
            assert (now.files, now.zombie_bytes, now.spare_bytes) == (1, 0, 0)
            assert grants(store) == set()

    asyncio.run(main())


async def held(peer: Peer, halves: list[int]) -> list[PutTask]:
    """Check that the store has none of `halves`, and return the tasks that it lists."""
    for number in halves:
        wanted = Locate(tasks=[PutTask(f"train/0/{number}", 1)])
        with pytest.raises(RpcError) as caught:
            await peer.store.call(wanted, Located, deadline_s=CALL_S)
        assert caught.value.code == ErrorCode.MISSING
    return (await peer.store.call(GetInventory(), Inventory, deadline_s=CALL_S)).tasks
