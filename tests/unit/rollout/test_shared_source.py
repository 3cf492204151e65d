"""A version is fetched once for all leases that wait for it, and released once it is in the engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from proto.messages import BatchMeta, ErrorCode
from proto.tensors import Array
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.weights.source import Arrays, WeightsSource
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.lease import Lease
from shared.rpc.errors import RpcError
from tests.unit.rollout.told_engine import ref_of, weights_of
from tests.unit.rollout.versions_rig import FIRST, FRESH, lease_of, rig, tasks, worker_of


class Store:
    """A data plane that records the fetched versions. The first `failing` fetches fail."""

    def __init__(self, failing: int = 0) -> None:
        self.fetched: list[int] = []
        self.failing = failing

    async def fetch(
        self, meta: BatchMeta, keys: Sequence[str], *, deadline_s: float, on_progress: OnProgress = ignore_progress
    ) -> list[dict[str, Array]]:
        step = int(meta.tasks[0].task_id.rpartition("/")[2])
        self.fetched.append(step)
        await asyncio.sleep(0)
        on_progress()
        if len(self.fetched) <= self.failing:
            raise RpcError(ErrorCode.DEADLINE, "the store is away")
        return [weights_of(step)]


def source_of(store: Any) -> WeightsSource:
    return WeightsSource(store, emit=lambda topic, values: None)


def test_a_prepared_lease_gets_the_weights_that_a_waiting_lease_has_fetched() -> None:
    async def prepare(_: Lease) -> PreparedTasks:
        return tasks([FRESH])

    async def scenario() -> None:
        async with rig() as made:
            store = Store()
            worker = worker_of(made, source=source_of(store), prepare=prepare)
            other = made.begin(exact=True)  # Both leases wait for this lease to end.
            first, second = lease_of(FIRST + 1), lease_of(FIRST + 1)
            one = await worker._prepare(first)
            sampling = asyncio.create_task(worker._sample(first, one))
            two = await worker._prepare(second)
            assert made.versions._ahead[first] is made.versions._ahead[second]
            made.end(other)
            assert await sampling is not None
            assert await worker._sample(second, two) is not None
            assert store.fetched == [FIRST + 1]

    asyncio.run(scenario())


def test_concurrent_fetches_of_a_version_share_one_delivery_and_keep_it_only_while_in_use() -> None:
    async def scenario() -> None:
        store = Store()
        source = source_of(store)
        one, two, other = await asyncio.gather(*(source.fetch(ref_of(step)) for step in (5, 5, 6)))
        assert one is two
        assert one is not other
        assert sorted(store.fetched) == [5, 6]
        gone = weakref.ref(one)
        del one, two
        await asyncio.sleep(0)  # This lets the loop drop the result of the previous step.
        gc.collect()
        assert gone() is None
        await source.fetch(ref_of(5))
        assert sorted(store.fetched) == [5, 5, 6]

    asyncio.run(scenario())


def test_a_waiter_starts_its_own_fetch_after_the_shared_fetch_fails() -> None:
    async def scenario() -> None:
        store = Store(failing=1)
        source = source_of(store)
        first, second = asyncio.create_task(source.fetch(ref_of(5))), asyncio.create_task(source.fetch(ref_of(5)))
        with pytest.raises(RpcError, match="the store is away"):
            await first
        assert isinstance(await second, Arrays)
        assert store.fetched == [5, 5]

    asyncio.run(scenario())


def test_progress_of_a_fetch_is_reported_to_all_waiters() -> None:
    async def scenario() -> None:
        source = source_of(Store())
        came: list[str] = []
        await asyncio.gather(*(source.fetch(ref_of(5), partial(came.append, name)) for name in ("one", "two")))
        # The first waiter's turn is reported, then progress to both, then the second waiter's turn.
        assert came == ["one", "one", "two", "two"]

    asyncio.run(scenario())
