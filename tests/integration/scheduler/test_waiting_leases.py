"""Tests leases whose data calls take longer than `lease_s`, with real stores, real links and the scheduler's lease
clock."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from proto.messages import BatchMeta, LeaseGrant
from services.rollout.weights import source as weights_source
from services.rollout.weights.source import Arrays, WeightsSource
from services.scheduler.leases import LeasePaces
from shared.dataplane.client import TaskShards
from shared.dataplane.stream import OnProgress
from shared.lease import Lease, LeaseBook
from tests.integration.store_process import STORE, StoreProcess, make_run, peer_of
from tests.integration.stream_line import TcpLine, TcpStoreProcess, remote
from tests.unit.rollout.told_engine import ref_of

T = TypeVar("T")
LEASE_S, BEAT_S = 0.6, 0.1


class Holder:
    """A service that holds one lease, and the scheduler that receives its heartbeats."""

    def __init__(self) -> None:
        log = SimpleNamespace(warning=lambda *_, **__: None)
        service = SimpleNamespace(log=log, telemetry=SimpleNamespace(traced=lambda _: []))
        self.book = LeaseBook(service, "rollout", lambda: 0)  # type: ignore[arg-type]
        grant = LeaseGrant(lease_id=1, stage="rollout", split="train", lease_s=LEASE_S, batch=BatchMeta(tasks=[]))
        self.lease = Lease(grant, lambda: 0)
        self.book._held[1] = self.lease
        self.paces = LeasePaces(LEASE_S)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats during the block. The lease is lost if the heartbeats stop reporting progress."""

        async def beat() -> None:
            clock = asyncio.get_running_loop().time
            self.paces.begin(1, clock())
            while not (lost := self.paces.expired(clock())):
                for each in self.book.progress():
                    self.paces.heard(each, clock())
                await asyncio.sleep(BEAT_S)
            self.book.lost([each.lease_id for each in lost])

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def in_time(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(main())


def test_weights_that_take_longer_than_a_lease_arrive_in_one_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_source, "FETCH_S", LEASE_S)
    weights = {"w": np.random.default_rng(0).standard_normal(2_000_000)}
    ref = ref_of(7)
    store = TcpStoreProcess(make_run(tmp_path, memory=64 << 20))
    line = TcpLine(store.port, 6e6)  # The transfer takes 2.7 s.
    store.advertised = f"tcp://127.0.0.1:{line.port}"

    async def scenario() -> None:
        holder = Holder()
        async with line.open(), peer_of(store.run) as peer:
            await peer.data.put([TaskShards(ref.task_id, ref.fence, weights)], store=STORE, deadline_s=10)
            data = remote(peer)

            async def fetch(on_progress: OnProgress) -> Any:
                return await WeightsSource(data, emit=lambda topic, values: None).fetch(ref, on_progress)

            async with holder.beating():
                found = await holder.book.persist(holder.lease, "weights", fetch, LEASE_S)
            assert isinstance(found, Arrays)
            np.testing.assert_array_equal(found.weights["w"], weights["w"])
            assert not holder.lease.cancel.is_set()
            assert data.streams.counts.received_bytes < 1.1 * weights["w"].nbytes
            data.close()

    store.start()
    try:
        in_time(scenario())
    finally:
        store.kill()
        store.run.remove_volatile()


@pytest.mark.long
def test_a_lease_survives_an_absence_of_the_store_for_several_lease_terms(tmp_path: Path) -> None:
    store = StoreProcess(make_run(tmp_path, memory=64 << 20))
    shards = [TaskShards("train/0/0", 1, {"a": np.arange(1000, dtype=np.int32)})]

    async def scenario() -> None:
        holder = Holder()
        async with peer_of(store.run) as peer:
            assert store.process is not None
            os.kill(store.process.pid, signal.SIGSTOP)

            async def put(_: OnProgress) -> Any:
                return await peer.data.put(shards, store=STORE, deadline_s=20)

            async with holder.beating():
                putting = asyncio.create_task(holder.book.persist(holder.lease, "put", put, 20))
                await asyncio.sleep(4 * LEASE_S)
                os.kill(store.process.pid, signal.SIGCONT)
                [receipt] = await putting
            assert receipt.task_id == "train/0/0"
            assert not holder.lease.cancel.is_set()

    store.start()
    try:
        in_time(scenario())
    finally:
        store.kill()
        store.run.remove_volatile()
