"""Tests how weights pass from host to host between real stores in network namespaces, over links with a limited
rate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.messages import (
    Ack,
    Clear,
    ErrorCode,
    GetStoreStats,
    GetWaits,
    Held,
    Hold,
    PutTask,
    StoreStats,
    Waits,
    WeightsRef,
)
from shared.batch import fetch_weights
from shared.dataplane.client import DataClient
from shared.rpc.errors import RpcError
from tests.integration.relay_run import VERSION, WITHIN_S, RelayRun, relay_run, same, weights_of
from tests.integration.star import Unavailable, star
from tests.integration.store_process import STORE, peer_of
from tests.integration.store_scheduler import CANARY

LINE_BYTES_PER_S = 10_000_000
BYTES = 24 << 20
"""Size of a version. Sending a version over a link takes more than two seconds."""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RelayRun]:
    try:
        with star(4, LINE_BYTES_PER_S) as hosts, relay_run(tmp_path, hosts) as made:
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


def interruptions(run: RelayRun, host: int) -> list[tuple[str, str]]:
    """Return the source and the cause of each interruption that a store has logged."""
    rows = [json.loads(line) for line in run.log_of(host).splitlines()]
    return [(row["source"], row["why"]) for row in rows if row["event"] == "relay interrupted"]


async def waited_for(run: RelayRun, host: int) -> list[str]:
    """Return the processes from which a store reports that it is waiting for the version."""
    async with run.client(host) as client:
        waits = await client.call(GetWaits(), Waits, deadline_s=WITHIN_S)
    return [row.of for row in waits.waits if row.what.startswith(VERSION.task_id)]


async def half_way(run: RelayRun, host: int) -> None:
    """Wait until a host has part of the version."""
    async with asyncio.timeout(WITHIN_S):
        while not 0 < (await run.held(host)).held_bytes < BYTES:
            await asyncio.sleep(0.05)


def test_hosts_receive_the_right_bytes_when_the_host_before_them_is_killed_halfway(run: RelayRun) -> None:
    weights = weights_of(BYTES)

    async def main() -> None:
        await run.put(weights)
        for host in (1, 2, 3):
            run.start_store(host)
        await run.chained((1, 2, 3))
        takes = [asyncio.create_task(run.take(host)) for host in (2, 3)]
        await half_way(run, 3)
        assert await waited_for(run, 3) == ["batch-store/2"]
        run.kill_store(1)
        for found, _ in await asyncio.gather(*takes):
            assert same(found, weights)

    asyncio.run(main())
    assert interruptions(run, 2)[0][0] == "batch-store/1"
    assert {source for source, _ in interruptions(run, 3)} <= {"batch-store/2"}


def test_a_host_that_relays_a_wrong_bit_is_blamed_and_the_chunk_is_fetched_elsewhere(run: RelayRun) -> None:
    weights = weights_of(BYTES)

    async def main() -> None:
        await run.put(weights)
        run.start_store(1, "tests.integration.damaging_store")
        for host in (2, 3):
            run.start_store(host)
        await run.chained((1, 2, 3))
        taken = await asyncio.gather(*(run.take(host) for host in (1, 2, 3)))
        assert all(same(found, weights) for found, _ in taken)

    asyncio.run(main())
    ((source, why),) = interruptions(run, 2)
    assert source == "batch-store/1"
    assert why == "bytes 5242880 to 6291456 do not match the digest from the trainer's store"
    assert interruptions(run, 3) == []


@pytest.mark.long
def test_hosts_receive_everything_when_the_host_before_them_stops_and_another_joins_halfway(run: RelayRun) -> None:
    weights = weights_of(BYTES)

    async def main() -> None:
        await run.put(weights)
        for host in (1, 2):
            run.start_store(host)
        await run.chained((1, 2))
        take = asyncio.create_task(run.take(2))
        await half_way(run, 2)
        run.stores[1].send_signal(signal.SIGSTOP)
        run.start_store(3)
        await run.chained((2, 3))
        for found, _ in await asyncio.gather(take, run.take(3)):
            assert same(found, weights)

    asyncio.run(main())
    assert interruptions(run, 2)[0][0] == "batch-store/1"


@pytest.mark.long
def test_a_host_behind_a_partition_is_refused_the_version_and_gets_the_next_one(run: RelayRun) -> None:
    first, second = weights_of(BYTES, seed=1), weights_of(BYTES, seed=2)
    later = PutTask("weights/0/2", 1)

    async def main() -> None:
        await run.put(first)
        for host in (1, 2):
            run.start_store(host)
        await run.chained((1, 2))
        take = asyncio.create_task(run.take(2))
        await half_way(run, 2)
        run.hosts[2].set_line("down")
        for host in (0, 1):
            await run.clear(host, VERSION)
        await run.put(second, later)
        async with asyncio.timeout(WITHIN_S):
            while not interruptions(run, 2):  # shorter partitions only delay data in transit
                await asyncio.sleep(0.1)
        run.hosts[2].set_line("up")
        with pytest.raises(RpcError) as refused:
            await take
        assert refused.value.code == ErrorCode.COLLECTED
        found, _ = await run.take(2, later)
        assert same(found, second)

    asyncio.run(main())


def test_a_relayed_copy_is_cleared_with_its_version_and_a_cleared_version_is_refused(run: RelayRun) -> None:
    weights = weights_of(BYTES // 8)

    async def main() -> None:
        await run.put(weights)
        run.start_store(1)
        await run.chained((1,))
        found, _ = await run.take(1)
        assert same(found, weights)
        del found
        async with run.client(1) as client:
            before = await client.call(GetStoreStats(), StoreStats, deadline_s=WITHIN_S)
            await client.call(Clear(tasks=[VERSION]), Ack, deadline_s=WITHIN_S)
            after = await client.call(GetStoreStats(), StoreStats, deadline_s=WITHIN_S)
            assert (before.tasks, after.tasks) == (1, 0)
            with pytest.raises(RpcError) as refused:
                await client.call(Hold(task=VERSION, origin=STORE), Held, deadline_s=WITHIN_S)
        assert refused.value.code == ErrorCode.COLLECTED

    asyncio.run(main())


def test_a_damaged_copy_is_dropped_and_readers_get_the_version_from_the_trainers_store(run: RelayRun) -> None:
    weights = weights_of(BYTES // 8)
    version = {"lineage": 0, "step": 1, "task_id": VERSION.task_id, "fence": VERSION.fence, "store": STORE}
    ref = WeightsRef(**version, nbytes=BYTES // 8, canary=CANARY, drill=CANARY, drill_seed=0)

    async def main() -> None:
        await run.put(weights)
        run.start_store(1)
        await run.chained((1,))
        await run.take(1)
        (copy,) = (run.run_of(1).shm / "batch-store-1").glob("*.blk")
        with copy.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-100, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        async with peer_of(run.home) as home, peer_of(run.run_of(1), 1) as away:
            data = DataClient(lambda _, instance: (home, away)[instance].store)
            found = await fetch_weights(data, ref, "batch-store/1", deadline_s=WITHIN_S)
            assert same(found, weights)
            stats = await away.store.call(GetStoreStats(), StoreStats, deadline_s=WITHIN_S)
            assert stats.tasks == 0
            found = await fetch_weights(data, ref, "batch-store/1", deadline_s=WITHIN_S)
            assert same(found, weights)
            stats = await away.store.call(GetStoreStats(), StoreStats, deadline_s=WITHIN_S)
            assert stats.tasks == 1
            data.close()

    asyncio.run(main())
