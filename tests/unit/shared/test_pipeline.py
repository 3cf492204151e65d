"""Tests how many leases a pipeline around a compute thread computes at a time, and how many it holds ahead."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from proto.messages import BatchMeta, Complete, CompleteAck, ErrorCode, LeaseGrant
from shared import pipeline
from shared.actor.telemetry import TelemetrySender
from shared.lease import Lease, LeaseBook, Retired
from shared.pipeline import LeasePipeline
from shared.rpc.errors import RpcError
from tests.unit.rollout.told_engine import ref_of


class Rig:
    """A pipeline whose leases are computed until the test ends the computations."""

    def __init__(self, side_by_side: int) -> None:
        self.leased = 0
        self.may_lease = asyncio.Event()
        self.may_lease.set()
        self.computing: dict[int, asyncio.Event] = {}
        self.finishing: dict[int, Lease] = {}
        self.finished: list[int] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.handed_back: dict[int, bool] = {}
        """Leases that were handed back, and whether each was untouched."""
        quiet = SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None)
        service = SimpleNamespace(
            log=quiet,
            incarnation=7,
            scheduler=SimpleNamespace(call=self._call),
            telemetry=TelemetrySender("rollout", 0, 7),
        )
        self.book = LeaseBook(service, "rollout", lambda: 0)  # type: ignore[arg-type]
        self.pipeline: LeasePipeline[int, int] = LeasePipeline(
            self.book,
            acquire=self._acquire,
            prepare=self._prepare,
            compute=self._compute,
            finish=self._finish,
            side_by_side=side_by_side,
            may_lease=self.may_lease,
        )

    async def _acquire(self) -> Lease:
        if self.book.retired.is_set():  # `LeaseBook.acquire` does the same.
            raise Retired
        self.leased += 1
        grant = LeaseGrant(
            lease_id=self.leased,
            stage="rollout",
            split="train",
            lease_s=30,
            batch=BatchMeta(tasks=[]),
            group_size=1,
            block_rows=0,
        )
        lease = Lease(grant, lambda: 0)
        self.book._held[self.leased] = lease
        return lease

    async def _call(self, request: Complete, reply: type[CompleteAck], *, deadline_s: float) -> CompleteAck:
        self.handed_back[request.lease_id] = request.untouched
        return CompleteAck()

    async def _prepare(self, lease: Lease) -> int:
        return lease.grant.lease_id

    async def _compute(self, lease: Lease, number: int) -> int:
        ended = self.computing[number] = asyncio.Event()
        await ended.wait()
        del self.computing[number]
        return number

    async def _finish(self, lease: Lease, prepared: int, computed: int) -> None:
        self.finishing[computed] = lease
        await self.may_finish.wait()
        self.finished.append(computed)

    def untouched(self) -> set[int]:
        return {each.lease_id for each in self.book.progress() if each.untouched}

    def progress(self) -> dict[int, int]:
        return {each.lease_id: each.progress for each in self.book.progress()}


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("side_by_side", [1, 2, 3])
def test_leases_are_computed_side_by_side_and_one_more_is_held_ahead(side_by_side: int) -> None:
    async def scenario() -> None:
        made = Rig(side_by_side)
        running = asyncio.create_task(made.pipeline.run())
        await settle()
        assert sorted(made.computing) == list(range(1, side_by_side + 1))
        assert made.leased == side_by_side + 1
        made.computing[side_by_side].set()  # The last of the leases is computed first.
        await settle()
        assert made.finished == [side_by_side]
        assert side_by_side + 1 in made.computing
        assert made.leased == side_by_side + 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not any(task.get_coro().__name__ == "_compute" for task in asyncio.all_tasks())  # type: ignore[union-attr]

    asyncio.run(scenario())


async def full(made: Rig) -> asyncio.Task[None]:
    """Return a running pipeline: two leases are being finished, one is waiting to be finished, and one is waiting to be
    computed."""
    made.may_finish.clear()
    running = asyncio.create_task(made.pipeline.run())
    for number in (1, 2, 3):
        await settle()
        made.computing[number].set()
    await settle()
    return running


def test_a_failed_computation_ends_the_pipeline_and_the_computations_beside_it() -> None:
    async def scenario() -> None:
        made = Rig(2)
        ended: list[int] = []

        async def compute(lease: Lease, number: int) -> int:
            try:
                if number == 2:
                    await asyncio.sleep(0)
                    raise ValueError("broken")
                await asyncio.Event().wait()
                return number
            finally:
                ended.append(number)

        made.pipeline._compute = compute
        with pytest.raises(ValueError, match="broken"):
            await made.pipeline.run()
        assert sorted(ended) == [1, 2]

    asyncio.run(scenario())


def test_leases_behind_slow_ones_share_their_progress() -> None:
    async def scenario() -> None:
        made = Rig(1)
        running = await full(made)
        assert (sorted(made.finishing), made.computing, made.leased) == ([1, 2], {}, 4)
        assert made.untouched() == {4}
        made.progress()
        before = made.progress()
        assert made.progress() == before  # No lease makes progress, so none is renewed.
        made.finishing[1].advance()
        after = made.progress()
        assert {number: after[number] - before[number] for number in after} == {1: 1, 2: 0, 3: 1, 4: 1}
        made.may_finish.set()
        await settle()
        assert made.finished == [1, 2, 3]
        assert sorted(made.computing) == [4]
        assert made.untouched() == {5}
        made.progress()
        before = made.progress()
        made.book._held[2].advance()
        assert made.progress()[4] == before[4]  # Lease 4 is itself being computed now.
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_leases_that_are_lost_while_they_wait_are_neither_computed_nor_finished() -> None:
    async def scenario() -> None:
        made = Rig(1)
        running = await full(made)
        made.book.lost([3, 4])  # One lease has been computed, and the other has been prepared.
        made.may_finish.set()
        await settle()
        assert sorted(made.finishing) == made.finished == [1, 2]
        assert sorted(made.computing) == [5]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_drain_does_not_count_as_an_attempt_for_tasks_that_were_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.pipeline.DRAIN_FINISH_S", 0.0)

    async def scenario() -> dict[int, bool]:
        made = Rig(1)
        made.may_finish.clear()
        running = asyncio.create_task(made.pipeline.run())
        await settle()
        made.computing[1].set()
        await settle()
        assert sorted(made.computing) == [2]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.pipeline.drain()
        return made.handed_back

    assert asyncio.run(scenario()) == {1: False, 2: True, 3: True}


@pytest.mark.parametrize("versions", [[1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2]])
def test_weights_that_can_never_be_fetched_end_the_service_with_an_error(
    versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.pipeline.PREPARE_S", 0.0)
    monkeypatch.setattr("shared.pipeline.BACKOFF_S", 0.0)

    async def scenario() -> Rig:
        made, steps = Rig(1), iter(versions)

        async def prepare(lease: Lease) -> int:
            lease.grant = msgspec.structs.replace(lease.grant, weights=ref_of(next(steps)))
            raise RpcError(ErrorCode.MISSING, "batch-store/0: damaged shards: a checksum differs")

        made.pipeline._prepare = prepare
        with pytest.raises(RpcError, match="--resume") as failed:
            await asyncio.wait_for(made.pipeline.run(), 20)
        assert f"version {versions[-1]} of lineage 0 (weights/0/{versions[-1]} in batch-store/0)" in str(failed.value)
        assert "4 attempts" in str(failed.value)
        assert "a checksum differs" in str(failed.value)
        return made

    made = asyncio.run(scenario())
    assert made.handed_back == {number: True for number in range(1, len(versions) + 1)}


def test_leasing_can_be_paused_and_a_grant_during_the_pause_is_handed_back() -> None:
    async def scenario() -> None:
        made = Rig(1)
        running = asyncio.create_task(made.pipeline.run())
        await settle()
        assert (made.leased, sorted(made.computing)) == (2, [1])
        made.may_lease.clear()
        made.computing[1].set()
        await settle()
        assert (made.leased, sorted(made.computing)) == (2, [2])  # The lease that was held ahead continues.
        acquire = made.pipeline._acquire

        async def late() -> Lease:
            made.may_lease.clear()  # At this moment, the scheduler is holding the request back.
            return await acquire()

        made.pipeline._acquire = late
        made.may_lease.set()
        await settle()
        assert made.leased == 3
        assert made.handed_back == {3: True}
        made.pipeline._acquire = acquire
        made.may_lease.set()
        await settle()
        assert made.leased == 4
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_draining_hands_a_lease_back_as_untouched_if_its_tasks_are_not_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        made = Rig(1)
        running = await full(made)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made.finishing[1].untouched = True
        monkeypatch.setattr(pipeline, "DRAIN_FINISH_S", 0.0)
        await made.pipeline.drain()
        assert (made.handed_back[1], made.handed_back[2]) == (True, False)

    asyncio.run(scenario())


def test_a_retired_pipeline_finishes_the_leases_it_holds_and_ends_on_its_own() -> None:
    async def scenario() -> None:
        made = Rig(1)
        made.may_finish.clear()
        running = asyncio.create_task(made.pipeline.run())
        await settle()
        made.book.retired.set()
        made.computing[1].set()
        await settle()
        made.computing[2].set()  # The pipeline already held this lease.
        await settle()
        assert not running.done()
        assert made.finished == []
        made.may_finish.set()
        await asyncio.wait_for(running, 5)
        assert (made.leased, made.finished, made.handed_back) == (2, [1, 2], {})

    asyncio.run(scenario())


def test_a_pipeline_that_may_not_lease_ends_when_it_is_retired() -> None:
    async def scenario() -> None:
        made = Rig(1)
        made.may_lease.clear()
        running = asyncio.create_task(made.pipeline.run())
        await settle()
        assert not running.done()
        made.book.retired.set()
        await asyncio.wait_for(running, 5)
        assert made.leased == 0

    asyncio.run(scenario())
