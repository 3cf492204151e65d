"""Tests keys, roles and the gate: the peers admitted over tcp, their roles, and the messages each role may send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from proto import codec
from proto.envelope import FLAG_ONE_WAY
from proto.limits import CONTROL
from proto.messages import (
    Ack,
    Error,
    ErrorCode,
    GetInventory,
    GetLog,
    GetSnapshot,
    GetStatus,
    GetSupervisorState,
    Inventory,
    LogLines,
    Ping,
    Pong,
    RestartService,
    Snapshot,
    StopRun,
    Telemetry,
)
from proto.registry import Request, all_messages
from shared.rpc import mailbox as rpc_mailbox
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred, Mailbox
from shared.rundir import RunDir
from shared.security import connections
from shared.security.curve import check_listen, clear, lock, unlock
from shared.security.keys import Keyring, create, key_file, load
from shared.security.roles import LEAST_ROLE, Role, least_role
from shared.security.zap import Gate
from tests.unit.shared.rpc.rpc_actors import (
    DEADLINE_S,
    asking,
    double,
    eventually,
    keyring,
    raw_dealer,
    receive,
    serving,
    short_directory,
)

TCP = "tcp://127.0.0.1:*"


def pong(_: Ping, __: Call) -> Pong:
    return Pong(service="echo", instance=0, incarnation=1, state="READY")


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, ring: Keyring | None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if ring is not None:
        unlock(socket, ring)
    socket.connect(endpoint)
    return socket


def stranger() -> Keyring:
    """Return the keys of a client that made its own key pair and knows the server's public key."""
    public, secret = zmq.curve_keypair()
    return Keyring(Role.SERVICE, public, secret, keyring().known)


# ------------------------------------------------------------------------------------------------- key files


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    create(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"service.key", "operator.key", "observer.key", "public.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = [load(folder, role) for role in Role]
    create(folder)
    assert [load(folder, role) for role in Role] == before
    assert len({ring.secret for ring in before}) == len({ring.public for ring in before}) == 3
    assert {role: ring.role_of(ring.public) for role, ring in zip(Role, before, strict=True)} == {r: r for r in Role}
    assert before[0].role_of(b"x" * 40) is None


def test_a_secret_never_shows_in_a_repr(tmp_path: Path) -> None:
    create(tmp_path / "keys")
    ring = load(tmp_path / "keys", Role.SERVICE)
    assert ring.secret.decode() not in repr(ring)


def test_a_new_run_directory_has_keys_and_keeps_them(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    ring = load(run.keys, Role.OPERATOR)
    again = RunDir.reopen(run.path, shm_root=tmp_path / "shm")
    assert load(again.keys, Role.OPERATOR) == ring
    again.remove_volatile()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: key_file(folder, Role.SERVICE).unlink(), "No such file"),
        (lambda folder: key_file(folder, Role.SERVICE).chmod(0o640), "mode 0640 gives others access; chmod 600"),
        (lambda folder: (folder / "public.json").chmod(0o602), "mode 0602"),
        (lambda folder: key_file(folder, Role.SERVICE).write_text("{}"), "not the JSON"),
        (lambda folder: key_file(folder, Role.SERVICE).write_bytes(b"\xff" * 9000), "not the JSON"),
        (
            lambda folder: key_file(folder, Role.SERVICE).write_bytes(key_file(folder, Role.OBSERVER).read_bytes()),
            "it belongs to another role",
        ),
        (
            lambda folder: (folder / "public.json").write_text('{"service": "a", "operator": "b", "observer": "c"}'),
            "Z85",
        ),
        (
            lambda folder: (folder / "public.json").write_text(
                (folder / "public.json").read_text().replace(load(folder, Role.OBSERVER).public.decode(),
                                                             load(folder, Role.SERVICE).public.decode())
            ),
            "contain a key twice",
        ),
    ],
)  # fmt: skip
def test_the_error_for_a_bad_key_file_is_one_line_that_names_the_file_but_not_the_secret(
    tmp_path: Path, damage: Any, says: str
) -> None:
    folder = tmp_path / "keys"
    create(folder)
    secret = load(folder, Role.SERVICE).secret.decode()
    damage(folder)
    with pytest.raises(RpcError) as failure:
        load(folder, Role.SERVICE)
    text = str(failure.value)
    assert text.startswith(f"keys {folder}")
    assert says in text
    assert "\n" not in text
    assert secret not in text


def test_a_link_is_refused_as_a_key_file(tmp_path: Path) -> None:
    create(tmp_path / "keys")
    mine = key_file(tmp_path / "keys", Role.SERVICE)
    mine.rename(tmp_path / "elsewhere")
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RpcError, match=r"service\.key"):
        load(tmp_path / "keys", Role.SERVICE)


# ------------------------------------------------------------------------------------------------- the roles


def test_unlisted_messages_are_reserved_for_services_and_each_role_includes_the_rights_of_lesser_roles() -> None:
    allowed = {role: {kind for kind in all_messages().values() if least_role(kind) <= role} for role in Role}
    assert {kind.__name__ for kind in allowed[Role.OBSERVER]} == {"Ping", "GetSnapshot", "GetHistory"}
    assert {kind.__name__ for kind in allowed[Role.OPERATOR] - allowed[Role.OBSERVER]} == {
        "DrainService", "GetLog", "GetStatus", "GetStoreStats", "GetStory", "GetSupervisorState", "GetWaits", "Resolve",
        "RestartService", "ScaleService", "StopRun",
    }  # fmt: skip
    assert allowed[Role.SERVICE] == set(all_messages().values())
    assert all(issubclass(kind, Request) for kind in LEAST_ROLE)


@pytest.mark.parametrize("role", list(Role))
def test_a_role_reaches_the_handlers_of_its_messages_and_no_others(role: Role) -> None:
    reached: list[str] = []

    def note(body: Any, _: Call) -> Any:
        reached.append(type(body).__name__)
        return Ack()

    asked = [Ping(), GetSnapshot(), GetStatus(), GetSupervisorState(), StopRun(), RestartService(service="x"),
             GetInventory()]  # fmt: skip
    refusals: list[str] = []

    async def main() -> None:
        handlers = [(type(body), note) for body in asked]
        async with serving(TCP, *handlers, admits=Role.OBSERVER) as (mailbox, bound):
            with raw_dealer(bound, role) as socket:
                for number, body in enumerate(asked):
                    socket.send_multipart(codec.encode(body, request_id=number + 1, incarnation=5, remaining_s=9.0))
                    answer = codec.decode(await receive(socket)).body
                    if isinstance(answer, Error):
                        assert answer.code == ErrorCode.BAD_REQUEST
                        assert "\n" not in answer.message
                        refusals.append(answer.message)
                said = Telemetry(
                    service="a", instance=0, incarnation=1, sequence=1, dropped=0, at=0.0, topic="t", values={}
                )
                socket.send_multipart(codec.encode(said, request_id=0, incarnation=5, flags=FLAG_ONE_WAY))
                forbidden = sum(least_role(type(body)) > role for body in asked) + (role < Role.SERVICE)
                await eventually(lambda: mailbox.counts()["forbidden"] == forbidden)
            assert mailbox.counts()["malformed"] == 0

    asyncio.run(main())
    assert reached == [type(body).__name__ for body in asked if least_role(type(body)) <= role]
    assert len(refusals) == len(asked) - len(reached)
    assert all(text.endswith(f"you are {role.label}") for text in refusals)


def test_every_peer_on_ipc_has_the_service_role() -> None:
    async def main() -> None:
        with short_directory() as folder:
            async with serving(f"ipc://{folder}/echo", (GetInventory, double)) as (_, bound), asking(bound) as client:
                assert (await client.call(GetInventory(cursor=3), Inventory, deadline_s=DEADLINE_S)).cursor == 6

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- the gate


def test_tcp_is_refused_without_keys_on_both_sides() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with pytest.raises(RpcError, match=r"^echo/0: tcp://127.0.0.1:\* refused: tcp needs the keys of the run"):
                Mailbox("echo/0", 1).bind(context, TCP)
            with pytest.raises(RpcError, match=r"^echo/0 at tcp://127.0.0.1:9: tcp needs the run's keys"):
                Client(context, "tcp://127.0.0.1:9", "echo/0", 1)
        finally:
            context.destroy(0)

    asyncio.run(main())


def test_strangers_and_lesser_roles_never_get_past_the_handshake_and_are_counted() -> None:
    seen: list[Any] = []

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context, keyring())
        mailbox = Mailbox("echo/0", 1)
        mailbox.handle(Ping, lambda body, call: seen.append(call.role) or pong(body, call))
        bound = mailbox.bind(context, TCP, gate=gate)  # The gate admits operators and services.
        ping = codec.encode(Ping(), request_id=1, incarnation=7, remaining_s=9.0)
        peers = zmq.Context()
        refused = [dealer(peers, bound, each) for each in (stranger(), keyring(Role.OBSERVER), None)]
        wrong_server = Keyring(Role.SERVICE, keyring().public, keyring().secret, {
            **keyring().known, Role.SERVICE: zmq.curve_keypair()[0]})  # fmt: skip
        refused.append(dealer(peers, bound, wrong_server))
        for socket in refused:
            with contextlib.suppress(zmq.Again):  # The peer is refused before it can send.
                socket.send_multipart(ping, zmq.DONTWAIT)
        async with asking(bound) as client, asking(bound, role=Role.OPERATOR) as operator:
            await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            await operator.call(Ping(), Pong, deadline_s=DEADLINE_S)
            await eventually(lambda: gate.refused == {"unknown_key": 1, "role": 1})  # libzmq does not reconnect.
            await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
        assert not any(socket.poll(0) for socket in refused)
        assert gate.admitted == {Role.SERVICE: 1, Role.OPERATOR: 1}
        assert seen == [Role.SERVICE, Role.OPERATOR, Role.SERVICE]
        await mailbox.close()
        gate.close()
        peers.destroy(0)
        context.destroy(0)

    asyncio.run(main())


def test_a_locked_endpoint_does_not_admit_peers_while_no_gate_answers() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        server = context.socket(zmq.ROUTER)
        lock(server, keyring(), Role.OBSERVER)
        server.bind(TCP)
        socket = dealer(zmq.Context.instance(), server.getsockopt_string(zmq.LAST_ENDPOINT), keyring())
        with contextlib.suppress(zmq.Again):
            socket.send(b"x", zmq.DONTWAIT)
        assert not server.poll(500)
        socket.close()
    finally:
        context.destroy(0)


def test_a_peer_cannot_choose_its_own_role() -> None:
    """Metadata in a client's handshake, including a User-Id, does not replace the metadata from the gate."""
    roles: list[Role] = []

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context, keyring())
        mailbox = Mailbox("echo/0", 1)
        mailbox.handle(Ping, lambda body, call: roles.append(call.role) or pong(body, call))
        bound = mailbox.bind(context, TCP, gate=gate, admits=Role.OBSERVER)
        peers = zmq.Context()
        socket = peers.socket(zmq.DEALER)
        unlock(socket, keyring(Role.OBSERVER))
        for name in ("X-User-Id:service", "X-Role:service"):
            socket.setsockopt(zmq.METADATA, name.encode())
        socket.setsockopt(zmq.ROUTING_ID, b"service")
        socket.connect(bound)
        socket.send_multipart(codec.encode(Ping(), request_id=1, incarnation=7, remaining_s=9.0))
        await receive(socket)
        assert roles == [Role.OBSERVER]
        await mailbox.close()
        gate.close()
        peers.destroy(0)
        context.destroy(0)

    asyncio.run(main())


def test_a_mailbox_answers_on_ipc_and_tcp_and_a_client_can_move_between_them() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context, keyring())
        bursts: list[int] = []
        mailbox = Mailbox("echo/0", 1)
        mailbox.handle(GetInventory, double)
        with short_directory() as folder:
            ipc = mailbox.bind(context, f"ipc://{folder}/echo", lambda: bursts.append(1))
            tcp = mailbox.bind(context, TCP, gate=gate)
            client = Client(context, "", "echo/0", 9, keys=keyring())
            waiting = asyncio.create_task(client.call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S))
            with pytest.raises(DeadlineExceeded):
                await client.call(Ping(), Pong, deadline_s=0.1)
            for turn, endpoint in enumerate((tcp, ipc, tcp, ipc)):
                client.connect(endpoint)
                answer = await client.call(GetInventory(cursor=turn), Inventory, deadline_s=DEADLINE_S)
                assert answer.cursor == 2 * turn
            assert (await waiting).cursor == 2
            assert gate.admitted[Role.SERVICE] == 2
            assert bursts
            client.close()
            await mailbox.close()
            gate.close()
        context.destroy(0)

    asyncio.run(main())


def test_the_largest_body_can_be_sent_encrypted() -> None:
    """libzmq counts the bytes that encryption adds to a frame; if they exceeded its limit, the peers would reconnect
    forever."""

    async def main() -> None:
        room = CONTROL.body_bytes - len(codec.encode_body(LogLines(lines=[""], position=0))) - 4
        most = LogLines(lines=["x" * room], position=0)
        assert len(codec.encode_body(most)) == CONTROL.body_bytes
        async with serving(TCP, (GetLog, lambda _, __: most)) as (_, bound), asking(bound) as client:
            request = GetLog(service="s", instance=0, lines=1, position=0)
            assert await client.call(request, LogLines, deadline_s=DEADLINE_S) == most

    asyncio.run(main())


def test_a_client_that_moved_from_tcp_to_ipc_no_longer_uses_curve() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    unlock(socket, keyring())
    assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    clear(socket)
    assert socket.getsockopt(zmq.MECHANISM) == zmq.NULL
    context.destroy(0)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:1", "tcp://0.0.0.0:0", "tcp://[::]:0", "ipc:///x", "tcp://10.0.0.1", "tcp://10.0.0.1:x",
                 "tcp://10.0.0.1:99999", "tcp://:5", ""]
)  # fmt: skip
def test_invalid_listen_addresses_are_refused_with_a_one_line_error(endpoint: str) -> None:
    with pytest.raises(RpcError, match=r"^--listen .*must be tcp://ADDRESS:PORT.*$"):
        check_listen(endpoint)


def test_an_endpoint_that_can_be_announced_is_accepted() -> None:
    for endpoint in ("tcp://127.0.0.1:0", "tcp://host-1.example:7747", "tcp://[fe80::1]:9"):
        check_listen(endpoint)


# ------------------------------------------------------------------------------------------- replies and ids


def test_an_answer_is_never_given_to_another_role_under_the_same_id() -> None:
    counted = 0

    def count(_: Ping, __: Call) -> Pong:
        nonlocal counted
        counted += 1
        return Pong(service="echo", instance=0, incarnation=counted, state="READY")

    async def main() -> None:
        async with serving(TCP, (Ping, count), admits=Role.OBSERVER) as (_, bound):
            for role in (Role.SERVICE, Role.OBSERVER, Role.OPERATOR, Role.OBSERVER):
                with raw_dealer(bound, role) as socket:
                    socket.send_multipart(codec.encode(Ping(), request_id=4, incarnation=5, remaining_s=9.0))
                    body = codec.decode(await receive(socket)).body
                    assert isinstance(body, Pong)
                    answers.append(body.incarnation)

    answers: list[int] = []
    asyncio.run(main())
    assert answers == [1, 2, 3, 2]  # The second observer's request counts as a retry of the first observer's.


def test_another_request_under_a_used_id_is_a_conflict_during_and_after_the_first() -> None:
    async def main() -> None:
        release = asyncio.Event()
        handled: list[int] = []

        async def slow(body: GetInventory, _: Call) -> Inventory:
            handled.append(body.cursor)
            await release.wait()
            return Inventory(tasks=[], cursor=body.cursor)

        with short_directory() as folder:
            async with serving(f"ipc://{folder}/echo", (GetInventory, slow), (Ping, pong)) as (_, bound):
                with raw_dealer(bound) as first, raw_dealer(bound) as second:

                    def ask(socket: zmq.Socket[bytes], body: Any, number: int = 3) -> None:
                        socket.send_multipart(codec.encode(body, request_id=number, incarnation=5, remaining_s=9.0))

                    ask(first, GetInventory(cursor=1))
                    await eventually(lambda: handled)
                    for body in (GetInventory(cursor=2), Ping()):
                        ask(second, body)
                        answer = codec.decode(await receive(second)).body
                        assert isinstance(answer, Error)
                        assert answer.code == ErrorCode.CONFLICT
                    release.set()
                    assert codec.decode(await receive(first)).body == Inventory(tasks=[], cursor=1)
                    ask(second, Ping())
                    answer = codec.decode(await receive(second)).body
                    assert isinstance(answer, Error)
                    assert answer.code == ErrorCode.CONFLICT
                    ask(second, GetInventory(cursor=1))
                    assert codec.decode(await receive(second)).body == Inventory(tasks=[], cursor=1)
        assert handled == [1]

    asyncio.run(main())


def test_key_files_belong_to_the_user_that_made_them(tmp_path: Path) -> None:
    create(tmp_path / "keys")
    assert {path.stat().st_uid for path in (tmp_path / "keys").iterdir()} == {os.geteuid()}


def empty(_: GetSnapshot, __: Call) -> Snapshot:
    return Snapshot(sequence=1, rows=[], dropped=0)


def test_guests_displace_each_other_at_the_limit_of_connections_and_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate, mailbox = Gate(context, keyring()), Mailbox("echo/0", 1)
        mailbox.handle(GetSnapshot, empty)
        endpoint = mailbox.bind(context, "tcp://127.0.0.1:0", gate=gate, admits=Role.OBSERVER)
        async with contextlib.AsyncExitStack() as stack:
            service = await stack.enter_async_context(asking(endpoint))
            await service.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S)
            for life in range(8):
                guest = await stack.enter_async_context(asking(endpoint, 100 + life, Role.OBSERVER))
                await guest.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S)
            await service.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S)
        assert mailbox.counts()["ended_connections"] >= 6
        assert gate.admitted[Role.SERVICE] == 1  # it did not have to connect again
        await mailbox.close()
        gate.close()
        context.destroy(0)

    asyncio.run(scenario())


def test_requests_of_guests_in_progress_are_limited_and_leave_room_for_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_mailbox, "MAX_RUNNING_OF_GUESTS", 2)

    async def scenario() -> None:
        held: list[Call] = []

        def hold(_: GetSnapshot, call: Call) -> Deferred:
            held.append(call)
            return DEFERRED

        async with (
            serving("tcp://127.0.0.1:0", (GetSnapshot, hold), admits=Role.OBSERVER) as (_, endpoint),
            asking(endpoint, 7, Role.OBSERVER) as guest,
            asking(endpoint) as service,
        ):
            calls = [
                asyncio.create_task(each.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S))
                for each in (guest, guest, service)
            ]
            await eventually(lambda: len(held) == 3)
            with pytest.raises(RpcError, match="2 requests are being handled") as caught:
                await guest.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S)
            assert caught.value.code == ErrorCode.BUSY
            for call in held:
                call.reply(Snapshot(sequence=1, rows=[], dropped=0))
            await asyncio.gather(*calls)
            again = asyncio.create_task(guest.call(GetSnapshot(), Snapshot, deadline_s=DEADLINE_S))
            await eventually(lambda: len(held) == 4)
            held[3].reply(Snapshot(sequence=1, rows=[], dropped=0))
            await again

    asyncio.run(scenario())
