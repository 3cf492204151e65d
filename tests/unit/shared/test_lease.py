"""The progress of a lease is that of the compute thread until the lease has been computed, and then only the lease's
own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from proto.messages import BatchMeta, LeaseGrant
from shared.actor.telemetry import TelemetrySender
from shared.dataplane.stream import OnProgress
from shared.lease import Lease, LeaseBook, LeaseLost


def grant() -> LeaseGrant:
    return LeaseGrant(lease_id=7, stage="rollout", split="train", lease_s=30, batch=BatchMeta(tasks=[]))


def test_the_computation_of_another_block_renews_a_lease_that_waits_but_not_one_that_has_been_computed() -> None:
    counter = [10]
    lease = Lease(grant(), lambda: counter[0])
    assert lease.progress == 10
    counter[0] = 15
    assert lease.progress == 15
    lease.computed()
    counter[0] = 99  # The next block is computed, which does not renew a lease stuck in its rewards.
    assert lease.progress == 15
    lease.advance()
    assert lease.progress == 16


def test_checking_a_cancelled_lease_raises() -> None:
    lease = Lease(grant(), lambda: 0)
    lease.check()
    lease.cancel.set()
    with pytest.raises(LeaseLost, match="lease 7"):
        lease.check()


def book_of(lease: Lease) -> LeaseBook:
    log = SimpleNamespace(warning=lambda *_, **__: None)
    book = LeaseBook(SimpleNamespace(log=log, telemetry=TelemetrySender("rollout", 0, 7)), "rollout", lambda: 0)  # type: ignore[arg-type]
    book._held[7] = lease
    return book


def gets_on(book: LeaseBook) -> bool:
    """Return whether the next heartbeat reports more progress than this one."""
    [first], [second] = book.progress(), book.progress()
    return second.progress > first.progress


def test_waiting_for_a_call_renews_a_lease_only_within_the_limit_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("shared.lease.time", SimpleNamespace(monotonic=lambda: now))
    lease = Lease(grant(), lambda: 0)
    book = book_of(lease)
    calls: list[OnProgress] = []

    async def scenario() -> None:
        nonlocal now
        begun = asyncio.Event()

        async def attempt(on_progress: OnProgress) -> None:
            calls.append(on_progress)
            begun.set()
            await asyncio.Event().wait()

        waiting = asyncio.create_task(book.persist(lease, "put", attempt, 20.0))
        assert not gets_on(book)
        await begun.wait()
        now = 19.0
        assert gets_on(book)
        now = 21.0  # The call has exceeded its own limit, so it counts as hung.
        assert not gets_on(book)
        calls[0]()
        assert gets_on(book)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not gets_on(book)

    asyncio.run(scenario())


def test_a_call_for_a_lost_lease_ends_at_once() -> None:
    lease = Lease(grant(), lambda: 0)
    book = book_of(lease)
    ended: list[str] = []

    async def scenario() -> None:
        begun = asyncio.Event()

        async def attempt(_: OnProgress) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("attempt")

        waiting = asyncio.create_task(book.persist(lease, "weights", attempt, 60))
        await begun.wait()
        book.lost([7])
        with pytest.raises(LeaseLost, match="lease 7"):
            async with asyncio.timeout(5):
                await waiting
        assert ended == ["attempt"]

    asyncio.run(scenario())
