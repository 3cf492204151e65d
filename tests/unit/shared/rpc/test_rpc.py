"""Tests requests and replies over real sockets: deadlines, retries, restarts and handlers that fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import pytest

from proto import codec
from proto.messages import (
    Ack,
    ErrorCode,
    GetInventory,
    Inventory,
    Ping,
    Pong,
    StopRun,
    Telemetry,
    WaitKind,
)
from shared.rpc import client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.mailbox import DEFERRED, Call
from shared.rpc.transport import DRAIN_MESSAGES
from shared.security.roles import Role
from tests.unit.shared.rpc.rpc_actors import (
    CLIENT_INCARNATION,
    DEADLINE_S,
    asking,
    double,
    eventually,
    line_of,
    process,
    raw_dealer,
    receive,
    request,
    serving,
)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_request_gets_its_reply(ipc: str, transport: str) -> None:
    async def main() -> None:
        wanted = ipc if transport == "ipc" else "tcp://127.0.0.1:*"
        async with serving(wanted, (GetInventory, double)) as (_, bound), asking(bound) as client:
            assert (await client.call(GetInventory(cursor=21), Inventory, deadline_s=DEADLINE_S)).cursor == 42

    asyncio.run(main())


def test_thousands_of_concurrent_calls_are_all_answered_in_both_directions(ipc: str) -> None:
    """There are many more calls than one drain reads, so if an edge of the socket's descriptor is lost, a call
    hangs."""

    async def main() -> None:
        other = f"{ipc}b"
        async with serving(other, (GetInventory, double)) as (_, second), asking(second) as onward:

            async def forward(body: GetInventory, _: Call) -> Inventory:
                return await onward.call(body, Inventory, deadline_s=DEADLINE_S)

            async with serving(ipc, (GetInventory, forward)) as (_, first), asking(first) as client:
                count = 8 * DRAIN_MESSAGES
                answers = await asyncio.gather(
                    *[client.call(GetInventory(cursor=i), Inventory, deadline_s=DEADLINE_S) for i in range(count)]
                )
                assert [answer.cursor for answer in answers] == [2 * i for i in range(count)]

    asyncio.run(main())


def test_slow_answer_is_computed_once_although_the_client_asks_again(ipc: str) -> None:
    async def main() -> None:
        received = handled = 0

        async def slow(body: GetInventory, _: Call) -> Inventory:
            nonlocal handled
            handled += 1
            await asyncio.sleep(1.0)  # This is long enough for several resends.
            return Inventory(tasks=[], cursor=body.cursor)

        async with serving(ipc, (GetInventory, slow)) as (mailbox, bound), asking(bound) as client:
            pump = mailbox._doors[0].pump
            assert pump is not None
            deliver = pump._on_message

            def counted(frames: list[bytes]) -> None:
                nonlocal received
                received += 1
                deliver(frames)

            pump._on_message = counted
            assert (await client.call(GetInventory(cursor=3), Inventory, deadline_s=DEADLINE_S)).cursor == 3
        assert received > 1
        assert handled == 1

    asyncio.run(main())


def test_duplicate_of_an_answered_request_gets_the_same_bytes_again(ipc: str) -> None:
    async def main() -> None:
        handled: list[int] = []

        def count(body: GetInventory, _: Call) -> Inventory:
            handled.append(body.cursor)
            return Inventory(tasks=[], cursor=len(handled))

        async with serving(ipc, (GetInventory, count)):
            with raw_dealer(ipc) as first, raw_dealer(ipc) as reconnected:
                for socket in (first, first, reconnected):
                    socket.send_multipart(request(7))
                    assert codec.decode(await receive(socket)).body == Inventory(tasks=[], cursor=1)
                first.send_multipart(request(8))
                assert codec.decode(await receive(first)).body == Inventory(tasks=[], cursor=2)
                first.send_multipart(request(7, incarnation=CLIENT_INCARNATION + 1))
                assert codec.decode(await receive(first)).body == Inventory(tasks=[], cursor=3)
        assert len(handled) == 3

    asyncio.run(main())


def test_two_clients_in_one_process_never_get_each_others_replies(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (GetInventory, double)) as (_, bound), asking(bound) as a, asking(bound) as b:
            for i in range(20):
                assert (await a.call(GetInventory(cursor=i), Inventory, deadline_s=DEADLINE_S)).cursor == 2 * i
                assert (await b.call(GetInventory(cursor=-i), Inventory, deadline_s=DEADLINE_S)).cursor == -2 * i

    asyncio.run(main())


@pytest.mark.parametrize("resend_s", [client.FIRST_RESEND_S, 1000.0], ids=["by its timer", "when it is back"])
def test_request_survives_kill_9_and_restart_of_the_server(
    ipc: str, monkeypatch: pytest.MonkeyPatch, resend_s: float
) -> None:
    monkeypatch.setattr(client, "FIRST_RESEND_S", resend_s)
    stale = ipc.removeprefix("ipc://")

    async def main() -> None:
        async with asking(ipc) as ours:
            with process("mailbox", ipc) as server:
                assert line_of(server) == "bound"
                first = await ours.call(Ping(), Pong, deadline_s=DEADLINE_S)
                assert first.incarnation == server.pid
                server.send_signal(signal.SIGSTOP)  # The server has our request and dies before it answers.
                asked = asyncio.create_task(ours.call(Ping(), Pong, deadline_s=30.0))
                await eventually(lambda: any(pending.sent for pending in ours._pending.values()))
                server.kill()
                server.wait(10)
            assert os.path.exists(stale)  # The next owner finds the path taken.
            with process("mailbox", ipc) as server:
                assert (await asked).incarnation == server.pid

    asyncio.run(main())


def test_request_to_an_absent_peer_is_sent_when_the_peer_starts(ipc: str) -> None:
    async def main() -> None:
        async with asking(ipc) as client:
            asked = asyncio.create_task(client.call(GetInventory(cursor=4), Inventory, deadline_s=DEADLINE_S))
            await asyncio.sleep(0)
            async with serving(ipc, (GetInventory, double)):
                assert (await asked).cursor == 8

    asyncio.run(main())


def test_request_abandoned_while_the_peer_was_away_never_reaches_the_peer(ipc: str) -> None:
    async def main() -> None:
        seen: list[int] = []

        def record(body: GetInventory, _: Call) -> Inventory:
            seen.append(body.cursor)
            return Inventory(tasks=[], cursor=0)

        async with asking(ipc) as client:
            with pytest.raises(DeadlineExceeded):
                await client.call(GetInventory(cursor=1), Inventory, deadline_s=0.4)
            async with serving(ipc, (GetInventory, record)):
                await client.call(GetInventory(cursor=2), Inventory, deadline_s=DEADLINE_S)
        assert seen == [2]

    asyncio.run(main())


@pytest.mark.parametrize("deadline_s", [0.05, 0.4])
def test_deadline_names_the_request_and_the_peer(ipc: str, deadline_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asking(ipc) as client:
            began = loop.time()
            with pytest.raises(
                DeadlineExceeded, match=r"^GetInventory to echo/0: no answer in .* running\?.*$"
            ) as failure:
                await client.call(GetInventory(), Inventory, deadline_s=deadline_s)
            assert deadline_s * 0.9 <= loop.time() - began < deadline_s + 2
            assert failure.value.code == ErrorCode.DEADLINE
            assert not client._pending

    asyncio.run(main())


def test_a_call_with_no_time_left_or_on_a_closed_client_fails_at_once(ipc: str) -> None:
    async def main() -> None:
        async with asking(ipc) as client:
            with pytest.raises(DeadlineExceeded, match="echo/0"):
                await client.call(Ping(), Pong, deadline_s=0.0)
            waiting = asyncio.create_task(client.call(Ping(), Pong, deadline_s=DEADLINE_S))
            await asyncio.sleep(0)
            client.close()
            with pytest.raises(DeadlineExceeded, match="echo/0 was closed"):
                await waiting
            with pytest.raises(DeadlineExceeded, match="closed"):
                await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert client.tell(Ack()) is False

    asyncio.run(main())


def test_cancelled_call_leaves_nothing_behind(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (Ping, lambda _, __: DEFERRED)) as (_, bound), asking(bound) as client:
            task = asyncio.create_task(client.call(Ping(), Pong, deadline_s=DEADLINE_S))
            await eventually(lambda: client._pending)
            timer = next(iter(client._pending.values())).timer
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client._pending
            assert timer is not None
            assert timer.cancelled()

    asyncio.run(main())


def test_rpc_error_from_a_handler_arrives_unchanged(ipc: str) -> None:
    async def main() -> None:
        def busy(_: Ping, __: Call) -> Pong:
            raise RpcError(ErrorCode.BUSY, "no room", retry_after_s=1.5, names=["a", "b"])

        async def later(_: GetInventory, __: Call) -> Inventory:
            raise RpcError(ErrorCode.MISSING, "gone")

        async with serving(ipc, (Ping, busy), (GetInventory, later)) as (_, bound), asking(bound) as client:
            with pytest.raises(RpcError, match="no room") as failure:
                await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert (failure.value.code, failure.value.retry_after_s, failure.value.names) == ("busy", 1.5, ["a", "b"])
            with pytest.raises(RpcError, match="gone"):
                await client.call(GetInventory(), Inventory, deadline_s=DEADLINE_S)

    asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_defect_in_a_handler_is_an_internal_error_and_the_mailbox_continues(ipc: str, asynchronous: bool) -> None:
    async def main() -> None:
        def broken(_: Ping, __: Call) -> Any:
            raise KeyError("cheese")

        async def broken_later(_: Ping, __: Call) -> Any:
            raise KeyError("cheese")

        handler = broken_later if asynchronous else broken
        async with serving(ipc, (Ping, handler), (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            with pytest.raises(RpcError, match=r"^echo/0: Ping failed: KeyError: 'cheese'$") as failure:
                await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert failure.value.code == ErrorCode.INTERNAL
            assert not mailbox._running
            assert (await client.call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S)).cursor == 2

    asyncio.run(main())


@pytest.mark.parametrize("answer", [None, 3, [Ack()]])
def test_invalid_answer_from_a_handler_is_an_internal_error(ipc: str, answer: Any) -> None:
    async def main() -> None:
        async with serving(ipc, (StopRun, lambda _, __: answer)) as (mailbox, bound), asking(bound) as client:
            with pytest.raises(RpcError, match="StopRun failed") as failure:
                await client.call(StopRun(), Ack, deadline_s=DEADLINE_S)
            assert failure.value.code == ErrorCode.INTERNAL
            assert not mailbox._running

    asyncio.run(main())


def test_deferred_answer_is_sent_once_when_it_is_given(ipc: str) -> None:
    async def main() -> None:
        held: list[Call] = []

        def hold(_: GetInventory, call: Call) -> Any:
            held.append(call)
            return DEFERRED

        async with serving(ipc, (GetInventory, hold)) as (mailbox, _):
            with raw_dealer(ipc) as socket:
                for number in (1, 1, 2):  # The first request is resent before it is answered.
                    socket.send_multipart(request(number))
                await eventually(lambda: len(held) == 2)
                for number, call in enumerate(held):
                    call.reply(Inventory(tasks=[], cursor=9 + number))
                    call.reply(Inventory(tasks=[], cursor=99))
                    assert call.expiry is not None
                    assert call.expiry.cancelled()
                answers = [codec.decode(await receive(socket)) for _ in held]
                assert [(each.envelope.request_id, each.body.cursor) for each in answers] == [(1, 9), (2, 10)]
                assert not socket.poll(0)
            assert not mailbox._running

    asyncio.run(main())


def test_deferred_answer_that_never_comes_is_forgotten_after_the_deadline(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (Ping, lambda _, __: DEFERRED)) as (mailbox, bound), asking(bound) as client:
            with pytest.raises(DeadlineExceeded):
                await client.call(Ping(), Pong, deadline_s=0.2)
            assert len(mailbox._running) == 1
            await eventually(lambda: not mailbox._running, 5.0)

    asyncio.run(main())


def test_coroutine_handler_ends_at_the_callers_deadline(ipc: str) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def forever(_: Ping, __: Call) -> Pong:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        async with serving(ipc, (Ping, forever)) as (mailbox, bound), asking(bound) as client:
            with pytest.raises(RpcError, match="echo/0") as failure:
                await client.call(Ping(), Pong, deadline_s=0.3)
            assert failure.value.code == ErrorCode.DEADLINE
            async with asyncio.timeout(5):
                await ended.wait()
            await eventually(lambda: not mailbox._running and not mailbox._tasks)

    asyncio.run(main())


def test_one_way_messages_are_handled_and_not_answered(ipc: str) -> None:
    async def main() -> None:
        seen: list[str] = []
        message = Telemetry(
            service="a", instance=0, incarnation=1, sequence=1, dropped=0, at=0.0, topic="t", values={"x": 1.0}
        )
        async with serving(ipc, (Telemetry, lambda body, _: seen.append(body.topic) or Ack())) as (mailbox, bound):
            async with asking(bound) as client:
                for _ in range(3):
                    assert client.tell(message)  # The first messages are sent before the connection exists.
                await eventually(lambda: len(seen) == 3)
            assert not mailbox._running
            assert not mailbox._replies[Role.SERVICE]

    asyncio.run(main())


def test_messages_after_one_whose_callback_raises_are_delivered(ipc: str) -> None:
    async def main() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with serving(ipc, (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            pump = mailbox._doors[0].pump
            assert pump is not None
            deliver, failed = pump._on_message, 0

            def fail_first(frames: list[bytes]) -> None:
                nonlocal failed
                failed += 1
                if failed == 1:
                    raise RuntimeError("once")
                deliver(frames)

            pump._on_message = fail_first
            calls = [client.call(GetInventory(cursor=i), Inventory, deadline_s=DEADLINE_S) for i in range(5)]
            assert [answer.cursor for answer in await asyncio.gather(*calls)] == [0, 2, 4, 6, 8]
        assert len(problems) == 1

    asyncio.run(main())


def test_finished_calls_are_not_kept_alive(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            for i in range(50):
                await client.call(GetInventory(cursor=i), Inventory, deadline_s=3600.0)
            gc.collect()
            assert not [thing for thing in gc.get_objects() if isinstance(thing, Call)]
            assert not mailbox._running
            assert not client._pending

    asyncio.run(main())


def test_client_reports_unanswered_requests_and_repeated_refusals(ipc: str) -> None:
    async def main() -> None:
        full = True
        held: list[Call] = []

        def hold(_: GetInventory, call: Call) -> Any:
            held.append(call)
            return DEFERRED

        def refuse(_: Ping, call: Call) -> Pong:
            if full:
                raise RpcError(ErrorCode.BUSY, "no room")
            return Pong(service="echo", instance=0, incarnation=1, state="READY")

        async with serving(ipc, (GetInventory, hold), (Ping, refuse)), asking(ipc) as client:
            assert list(client.waits()) == []
            asked = asyncio.create_task(client.call(GetInventory(), Inventory, deadline_s=DEADLINE_S))
            await eventually(lambda: held)
            [row] = client.waits()
            assert (row.kind, row.what, row.of) == (WaitKind.CALL, "GetInventory", "echo/0")
            assert row.limit_s == pytest.approx(DEADLINE_S, abs=0.1)
            held[0].reply(Inventory(tasks=[], cursor=0))
            await asked
            since: list[float] = []
            for _ in range(2):
                with pytest.raises(RpcError, match="no room"):
                    await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
                [row] = client.waits()
                since.append(row.since_s)
                await asyncio.sleep(0.05)  # `since_s` must grow by at least this much.
            assert (row.kind, row.what) == (WaitKind.REFUSED, "Ping: no room")
            assert since[1] >= since[0] + 0.05
            full = False
            await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert list(client.waits()) == []

    asyncio.run(main())
