"""Tests sources of newer weights, and the leases that wait for these weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from proto.messages import ErrorCode, WeightsRef
from proto.tensors import Array
from services.rollout.sampling.answers import PartialJournal
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.sampling.trajectory import BlockVersions, Completion
from services.rollout.weights.source import Arrays, LoadedWeights, LoadEntry
from services.rollout.weights.transfer import TransferFailed
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.lease import Lease, LeaseLost
from shared.rpc.errors import RpcError
from tests.unit.rollout.told_engine import ToldEngine, ref_of, weights_of
from tests.unit.rollout.versions_rig import (
    FIRST,
    FRESH,
    NEW_TOKENS,
    NOTED,
    Rig,
    lease,
    lease_of,
    rig,
    tasks,
    versions_of,
    worker_of,
)


class Lost:
    """Weights whose transfer fails."""

    def __init__(self, entry: LoadEntry) -> None:
        self.entry = entry

    async def begin(self) -> None:
        """Accept the transfer."""

    def decline(self) -> None:
        raise AssertionError("they were wanted")

    async def load(self, engine: Any) -> LoadedWeights:
        raise TransferFailed("the sender is gone")


class Source:
    """A source of weights whose trainer is unreachable and whose store is reachable."""

    def __init__(self, entry: LoadEntry) -> None:
        self._entry = entry

    async def fetch(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Lost:
        return Lost(self._entry)

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
        return Arrays(weights_of(ref.step))


async def announced_at_step_3(made: Rig, folder: Path) -> dict[str, list[Completion]]:
    async def before_step(number: int) -> None:
        if number == 3:
            made.versions.announce(ref_of(FIRST + 1))
        for _ in range(20):
            await asyncio.sleep(0)

    made.engine.before_step = before_step
    return await made.sample(PartialJournal(folder, 1e9), [FRESH])


def test_a_failed_transfer_falls_back_to_the_store(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            made.versions._source = Source(LoadEntry.SET)
            return await announced_at_step_3(made, tmp_path)

    [versions] = versions_of(asyncio.run(scenario())).values()
    assert versions == [FIRST] * 2 + [FIRST + 1] * (NEW_TOKENS - 2)


def test_an_update_by_an_undrilled_entry_leaves_a_running_lease_unchanged(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            made.versions._source = Source(LoadEntry.RECEIVE)
            swaps = made.engine.swaps
            answers = await announced_at_step_3(made, tmp_path)
            assert made.sync.holds.step == FIRST
            assert made.engine.swaps == swaps  # No drill of that entry was started during sampling.
            return answers

    assert versions_of(asyncio.run(scenario())) == {FRESH: [FIRST] * NEW_TOKENS}


def test_newer_weights_come_from_the_store_for_a_minute_after_a_failed_transfer() -> None:
    async def scenario() -> list[int]:
        loop, skipped = asyncio.get_running_loop(), [0.0]
        clock = loop.time
        loop.time = lambda: clock() + skipped[0]  # type: ignore[method-assign]
        source, asked = Source(LoadEntry.SET), list[int]()
        fetch = source.fetch

        async def counted(ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Lost:
            asked.append(ref.step)
            return await fetch(ref, on_progress)

        source.fetch = counted  # type: ignore[method-assign]
        async with rig() as made:
            made.versions._source = source  # type: ignore[assignment]
            versions = made.begin(exact=False)
            for number, skip_s in enumerate((0.0, 58.0, 2.1, 58.0, 2.1), 1):
                skipped[0] += skip_s
                await made.swapped(FIRST + number)
            made.end(versions)
        return [step - FIRST for step in asked]

    assert asyncio.run(scenario()) == [1, 3, 5]


class Silent(Lost):
    """Weights from a sender that does not answer."""

    def __init__(self) -> None:
        super().__init__(LoadEntry.SET)
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def begin(self) -> None:
        self.asked.set()
        await self.given_up.wait()
        raise TransferFailed("no answer")


def test_sampling_continues_during_a_request_to_the_trainer_which_is_not_repeated_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            silent = Silent()
            source = Source(LoadEntry.SET)
            source.fetch = lambda ref: _ready(silent)  # type: ignore[assignment,method-assign,return-value]
            made.versions._source = source
            held: list[bool] = []

            async def before_step(number: int) -> None:
                if number == 2:
                    made.versions.announce(ref_of(FIRST + 1))
                    await silent.asked.wait()
                held.append(made.engine.is_held)
                if number == 5:
                    silent.given_up.set()
                    await made.swapped_to(FIRST + 1)
                    silent.asked.clear()
                    made.versions.announce(ref_of(FIRST + 2))
                    await made.swapped_to(FIRST + 2)

            made.engine.before_step = before_step
            answers = await made.sample(PartialJournal(tmp_path, 1e9), [FRESH])
            assert not any(held)
            assert versions_of(answers) == {FRESH: [FIRST] * 4 + [FIRST + 2] * (NEW_TOKENS - 4)}
            assert not silent.asked.is_set()

    asyncio.run(scenario())


async def _ready(delivery: Silent) -> Silent:
    return delivery


@pytest.mark.parametrize("entry", list(LoadEntry))
def test_a_lease_whose_weights_are_not_sent_gets_them_from_the_store(entry: LoadEntry) -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(entry))
            sampled = await worker._sample(lease_of(FIRST + 2), tasks([FRESH]))
            assert sampled is not None
            assert (sampled.version, made.sync.holds.step) == (FIRST + 2, FIRST + 2)

    asyncio.run(scenario())


def test_a_lease_that_waits_for_others_shares_their_progress_and_can_be_given_up_at_once() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(LoadEntry.SET))
            under_way, waits = lease([NOTED], exact=True), lease_of(FIRST + 1)
            made.leases._held = {1: under_way, 2: waits}
            other = made.begin(exact=True)
            waiting = asyncio.create_task(worker._sample(waits, tasks([FRESH])))
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.leases.queued == {waits}
            made.leases.progress()
            before = waits.progress
            made.leases.progress()
            assert waits.progress == before  # Neither lease makes progress.
            under_way.advance()
            made.leases.progress()
            assert waits.progress > before
            waits.give_up()
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(waiting, 10)
            assert not made.leases.queued
            made.end(other)

    asyncio.run(scenario())


def test_a_lease_that_waits_for_a_load_shares_its_progress_and_can_be_given_up_at_once() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(LoadEntry.SET))
            loads, waits = lease([NOTED]), lease_of(FIRST + 1)
            made.leases._held = {1: loads, 2: waits}
            async with made.versions._settled():
                waiting = asyncio.create_task(worker._sample(waits, tasks([FRESH])))
                for _ in range(20):
                    await asyncio.sleep(0)
                made.leases.progress()
                before = waits.progress
                loads.advance()
                made.leases.progress()
                assert waits.progress > before
                waits.give_up()
                with pytest.raises(LeaseLost):
                    await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


def test_scoring_stops_when_its_lease_is_lost() -> None:
    class Rewards:
        """Reward functions that never return."""

        async def score(self, groups: list[Any], advance: Callable[[], None]) -> list[Any]:
            await asyncio.Event().wait()
            return groups

    async def scenario() -> None:
        async with rig() as made:
            worker, lost = worker_of(made), lease([FRESH])
            worker._results._rewards = Rewards()  # type: ignore[assignment]
            scoring = asyncio.create_task(worker._results._scores(lost, []))
            await asyncio.sleep(0)
            lost.give_up()
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(scoring, 10)

    asyncio.run(scenario())


def test_an_engine_that_hangs_in_an_update_of_running_samples_ends_the_service() -> None:
    """The service ends even if another lease is waiting for weights at the same time."""

    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(LoadEntry.SET))
            worker._service.log = structlog.get_logger()
            held = [lease([NOTED]), lease_of(FIRST + 2)]
            for each in held:
                each.grant = msgspec.structs.replace(each.grant, lease_s=0.1)
            ahead = list(held)

            async def acquire() -> Lease:
                if not ahead:
                    await asyncio.Event().wait()
                return ahead.pop(0)

            async def prepare(lease: Lease) -> PreparedTasks:
                return tasks([task.task_id for task in lease.grant.batch.tasks])

            async def before_step(number: int) -> None:
                if number == 3:
                    made.versions.announce(ref_of(FIRST + 1))
                    await asyncio.sleep(0)

            async def hang(weights: dict[str, Any]) -> None:
                held[0].give_up()
                await asyncio.Event().wait()

            made.engine.before_step = before_step
            made.engine.set_weights = hang  # type: ignore[method-assign]
            worker._pipeline._acquire, worker._pipeline._prepare = acquire, prepare
            async with asyncio.timeout(20):
                with pytest.raises(RpcError, match="it is hanging"):
                    await worker.run()

    asyncio.run(scenario())


class Cleared(Source):
    """A source whose trainer is unreachable, and whose store has collected the version."""

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
        raise RpcError(ErrorCode.MISSING, "collected")


def test_a_lease_whose_version_was_collected_is_handed_back_and_the_engine_continues() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Cleared(LoadEntry.SET))
            back: list[bool] = []

            async def hand_back(lease: Lease, why: str, *, untouched: bool = False) -> None:
                assert "waited longer than its version lasted" in why
                back.append(untouched)

            made.leases.hand_back = hand_back  # type: ignore[method-assign]
            assert await worker._sample(lease_of(FIRST + 2), tasks([FRESH])) is None
            assert back == [True]
            made.versions._source = Source(LoadEntry.SET)
            sampled = await worker._sample(lease_of(FIRST + 3), tasks([FRESH]))
            assert sampled is not None
            assert sampled.version == FIRST + 3

    asyncio.run(scenario())


def test_weights_that_no_drilled_entry_can_load_are_not_fetched_during_sampling(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            brought: list[int] = []

            class FromStore(Source):
                async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
                    brought.append(ref.step)
                    return await super().from_store(ref, on_progress)

            made.sync._drilled = {LoadEntry.RECEIVE}
            made.versions._source = FromStore(LoadEntry.RECEIVE)
            await announced_at_step_3(made, tmp_path)
            assert made.sync.holds.step == FIRST
            assert not brought

    asyncio.run(scenario())


class RetainingEngine(ToldEngine):
    """An engine that retains one version beside the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.retained: set[int] = set()

    def retain(self, swaps: Collection[int]) -> bool:
        self.retained = set(swaps)
        return len(swaps) < 2


def test_new_leases_get_newer_weights_beside_running_ones_and_a_third_version_waits() -> None:
    async def scenario() -> None:
        async with rig(RetainingEngine()) as made:
            engine, versions = made.engine, made.versions
            assert isinstance(engine, RetainingEngine)
            first = made.begin(exact=False)
            paused: list[bool] = []
            score = engine.score

            async def scored(token_ids: Array) -> Array:
                paused.append(engine.is_held)
                return await score(token_ids)

            engine.score = scored  # type: ignore[method-assign]
            async with asyncio.timeout(10), versions.bring(lease_of(FIRST + 1), exact=False) as second:
                assert paused == [True]  # unproved weights never sample
                assert not engine.is_held
                assert (first.first, second.first) == (FIRST, FIRST + 1)
                assert engine.retained == {first.began}

                async def third() -> BlockVersions:
                    async with versions.bring(lease_of(FIRST + 2), exact=False) as begun:
                        return begun

                waiting = asyncio.create_task(third())
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not waiting.done()
                assert made.sync.holds.step == FIRST + 1
                made.end(first)
                begun = await waiting
                assert begun.first == FIRST + 2
                assert engine.retained == {second.began}

    asyncio.run(scenario())
