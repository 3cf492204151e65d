"""Tests requests and replies over real sockets: misbehaving peers, limited memory and messages that are refused."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any

import numpy as np
import pytest
import zmq

from proto import codec
from proto.envelope import FLAG_REPLY
from proto.errors import WireError
from proto.messages import (
    Ack,
    Error,
    ErrorCode,
    GetInventory,
    Inventory,
    Ping,
    Pong,
    PutTask,
    RestartService,
)
from shared.rpc.client import UNSENT_MESSAGES
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.mailbox import DEFERRED, Call
from shared.rpc.replies import CACHED_REPLY_BYTES
from shared.rpc.senders import STRIKES
from shared.security.roles import Role
from tests.unit.shared.rpc.rpc_actors import (
    DEADLINE_S,
    asking,
    double,
    eventually,
    raw_dealer,
    receive,
    request,
    serving,
)


def test_message_without_a_handler_and_unknown_type_are_refused_by_name(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc) as (mailbox, bound), asking(bound) as client:
            with pytest.raises(RpcError, match="echo/0 does not answer Ping") as failure:
                await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert failure.value.code == ErrorCode.BAD_REQUEST
            with raw_dealer(bound) as socket:
                frames = request(3)
                head = codec.envelope.unpack(frames[0], codec.CONTROL)
                frames[0] = codec.envelope.Envelope(
                    type=60000, request_id=3, incarnation=4, body_bytes=head.body_bytes, total_bytes=head.total_bytes
                ).pack()
                socket.send_multipart(frames)
                body = codec.decode(await receive(socket)).body
                assert isinstance(body, Error)
                assert "message type 60000: unknown" in body.message
            assert mailbox.offenders.malformed == 1

    asyncio.run(main())


def test_oversize_request_is_refused_before_it_is_sent_and_oversize_reply_is_reported(ipc: str) -> None:
    async def main() -> None:
        big = Inventory(tasks=[PutTask("train/0/0" + "0" * 200, 1)] * 50_000, cursor=0)
        async with serving(ipc, (GetInventory, lambda _, __: big)) as (_, bound), asking(bound) as client:
            with pytest.raises(WireError, match="limits are"):
                await client.call(RestartService(service="x" * (9 << 20)), Ack, deadline_s=DEADLINE_S)
            assert not client._pending
            with pytest.raises(RpcError, match=r"echo/0: Inventory of .* bytes: limits are") as failure:
                await client.call(GetInventory(), Inventory, deadline_s=DEADLINE_S)
            assert failure.value.code == ErrorCode.INTERNAL

    asyncio.run(main())


def test_peers_that_send_garbage_or_nothing_do_not_disturb_others() -> None:
    async def main() -> None:
        async with serving("tcp://127.0.0.1:*", (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            host, port = bound.removeprefix("tcp://").split(":")
            silent = await asyncio.open_connection(host, int(port))
            shouting = await asyncio.open_connection(host, int(port))
            shouting[1].write(os.urandom(1 << 16))
            with raw_dealer(bound) as socket:
                random = np.random.default_rng(0)
                sent = 200
                for i in range(sent):
                    socket.send_multipart([random.bytes(int(random.integers(0, 200))) for _ in range(i % 5 + 1)])
                for i in range(40):
                    assert (await client.call(GetInventory(cursor=i), Inventory, deadline_s=2.0)).cursor == 2 * i
                # Messages from a quarantined peer are dropped unread.
                await eventually(lambda: mailbox.offenders.malformed + mailbox.offenders.unread == sent)
                assert mailbox.offenders.malformed == STRIKES
                assert not socket.poll(0)  # No message could be identified as a request, so there is no answer.
            assert not mailbox._running
            silent[1].close()
            shouting[1].close()

    asyncio.run(main())


def test_two_hundred_thousand_empty_frames_cause_one_refusal_and_use_little_memory(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            await client.call(GetInventory(cursor=0), Inventory, deadline_s=DEADLINE_S)
            with raw_dealer(bound) as socket:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                socket.send_multipart([b""] * 200_000)
                await eventually(lambda: mailbox.offenders.malformed == 1)
                # libzmq keeps 64 bytes per frame in each of two queues of this process.
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
            assert (await client.call(GetInventory(cursor=5), Inventory, deadline_s=DEADLINE_S)).cursor == 10

    asyncio.run(main())


def test_client_that_never_reads_loses_its_replies_and_does_not_block_others(ipc: str) -> None:
    async def main() -> None:
        async with serving(ipc, (GetInventory, double)) as (mailbox, bound), asking(bound) as client:
            with raw_dealer(bound, RCVHWM=1, SNDHWM=0) as socket:
                for number in range(20_000):
                    socket.send_multipart(request(number + 1))
                    if number % 500 == 0:
                        await client.call(GetInventory(cursor=number), Inventory, deadline_s=5.0)
                await eventually(lambda: mailbox.lost_replies > 0)
            assert (await client.call(GetInventory(cursor=5), Inventory, deadline_s=5.0)).cursor == 10

    asyncio.run(main())


def test_a_vanished_client_loses_one_reply(ipc: str) -> None:
    async def main() -> None:
        held: list[Call] = []

        def hold(_: Ping, call: Call) -> Any:
            held.append(call)
            return DEFERRED

        async with serving(ipc, (Ping, hold)) as (mailbox, _):
            with raw_dealer(ipc) as socket:
                socket.send_multipart(codec.encode(Ping(), request_id=1, incarnation=2, remaining_s=9.0))
                await eventually(lambda: held)
            answer = Pong(service="echo", instance=0, incarnation=1, state="READY")
            probe = [held[0].sender.peer, b""]
            pump = mailbox._doors[0].pump
            assert pump is not None
            await eventually(lambda: not pump.send(probe))
            held[0].reply(answer)
            assert mailbox.lost_replies == 1
            assert not mailbox._running

    asyncio.run(main())


def test_reply_memory_is_bounded(ipc: str) -> None:
    async def main() -> None:
        # The reply is 4.2 MB long.
        big = Inventory(tasks=[PutTask("train/0/" + "1" * 200, i) for i in range(20_000)], cursor=0)
        async with serving(ipc, (GetInventory, lambda _, __: big)) as (mailbox, bound), asking(bound) as client:
            for _ in range(12):
                await client.call(GetInventory(), Inventory, deadline_s=DEADLINE_S)
            replies = mailbox._replies[Role.SERVICE]
            kept = sum(len(frame) for each in replies._kept.values() for frame in each.frames)
            assert kept == replies.nbytes <= CACHED_REPLY_BYTES
            assert 0 < len(replies) < 12

    asyncio.run(main())


def test_a_request_sent_as_a_one_way_message_is_refused(ipc: str) -> None:
    """The number of such requests would be unbounded, because their sender does not wait and they have no deadline."""

    async def main() -> None:
        seen: list[int] = []
        handler = (GetInventory, lambda body, _: seen.append(body.cursor) or Inventory(tasks=[], cursor=0))
        async with serving(ipc, handler) as (mailbox, bound), asking(bound) as client:
            assert client.tell(GetInventory(cursor=1))
            await client.call(GetInventory(cursor=2), Inventory, deadline_s=DEADLINE_S)
            assert seen == [2]
            assert not mailbox._running

    asyncio.run(main())


def test_messages_to_an_absent_peer_are_kept_up_to_a_limit_and_drops_are_reported(ipc: str) -> None:
    async def main() -> None:
        async with asking(ipc) as client:
            results = [client.tell(Ack()) for _ in range(UNSENT_MESSAGES + 10)]
        assert results == [True] * UNSENT_MESSAGES + [False] * 10

    asyncio.run(main())


def test_reply_sent_to_a_mailbox_and_request_sent_to_a_client_are_dropped(ipc: str) -> None:
    async def main() -> None:
        handled: list[Any] = []
        async with serving(ipc, (GetInventory, lambda body, _: handled.append(body) or Ack())) as (mailbox, _):
            with raw_dealer(ipc) as socket:
                socket.send_multipart(request(1, flags=FLAG_REPLY))
                await eventually(lambda: mailbox.offenders.malformed == 1)
                assert not socket.poll(50)
        assert not handled

        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(f"{ipc}r")
        async with asking(f"{ipc}r") as client:
            asked = asyncio.create_task(client.call(GetInventory(), Inventory, deadline_s=1.0))
            peer, head, _body = await receive(router)
            number = codec.envelope.unpack(head, codec.CONTROL).request_id
            answer = Inventory(tasks=[], cursor=1)
            router.send_multipart([peer, *codec.encode(answer, request_id=number, incarnation=1)])
            router.send_multipart([peer, b"garbage"])
            router.send_multipart([peer, *codec.encode(answer, request_id=number + 1, incarnation=1, flags=FLAG_REPLY)])
            with pytest.raises(DeadlineExceeded):
                await asked
        context.destroy(0)

    asyncio.run(main())
