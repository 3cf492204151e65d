"""Peers that hold a key attack a mailbox over tcp. The mailbox survives and keeps answering other peers, and its memory
usage stays small."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq

from proto import codec
from proto.messages import Error, GetInventory, GetSnapshot, Inventory, Located, Snapshot
from shared.os_limits import raise_descriptor_limit
from shared.rpc.replies import CACHED_REPLY_BYTES
from shared.rpc.senders import MAX_PEERS, QUARANTINE_S, WINDOW_S, Offenders
from shared.rpc.transport import MAX_FRAMES, SKIP_FRAMES, Pump
from shared.rpc.unread import GUEST_BYTES, GUESTS_BYTES, SERVICE_BYTES
from shared.rundir import RunDir
from shared.security import keys
from shared.security.connections import MOST_CONNECTIONS
from shared.security.roles import Role
from tests.unit.shared.rpc.rpc_actors import CLIENT_INCARNATION, asking, key_folder, raw_dealer, short_directory

ROOT = Path(__file__).resolve().parents[2]
FEW_DESCRIPTORS = 1024
GROWTH_BYTES = 64 << 20
ANSWER_S = 10.0
PINGS_S = 8.0
"""Seconds after which a peer that answers no ping finds that it cannot send: 6 until a server hangs up, and the 2 for
which its call waits."""
STRIKES = 32
"""Number of offences that lead to quarantine, as proto/SPEC.md states it."""


@dataclass
class Server:
    """Process under attack."""

    process: subprocess.Popen[str]
    tcp: str
    ipc: str

    def counts(self) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        counts = json.loads(self.process.stdout.readline())
        assert isinstance(counts, dict)
        return counts

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def most_rss_bytes(self) -> int:
        """Return the process's largest resident memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def answers(self, cursor: int = 21) -> None:
        """Check that a well-behaved client is served, over both endpoints."""

        async def ask() -> None:
            for endpoint in (self.ipc, self.tcp):
                async with asking(endpoint) as client:
                    answer = await client.call(GetInventory(cursor=cursor), Inventory, deadline_s=ANSWER_S)
                    assert answer.cursor == 2 * cursor

        asyncio.run(ask())


@pytest.fixture
def server() -> Iterator[Server]:
    with short_directory() as folder:
        ipc = f"ipc://{folder}/echo"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.hostile_server", str(key_folder()), ipc],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            under_attack = Server(process, process.stdout.readline().strip(), ipc)
            under_attack.answers()
            yield under_attack
            assert process.poll() is None, "the server died"
            under_attack.answers()
        finally:
            process.kill()
            process.communicate(timeout=10)


def request(number: int, cursor: int = 0) -> list[bytes]:
    frames = codec.encode(GetInventory(cursor=cursor), request_id=number, incarnation=CLIENT_INCARNATION, remaining_s=9)
    return [bytes(frame) for frame in frames]


@contextmanager
def growth(server: Server) -> Iterator[None]:
    before = server.rss_bytes()
    yield
    assert server.rss_bytes() - before < GROWTH_BYTES


@contextmanager
def asking_in_thread(endpoint: str) -> Iterator[Callable[[], None]]:
    """Yield a client whose connection stays open between its requests."""
    with asyncio.Runner() as runner:
        client = asking(endpoint)
        asked = runner.run(client.__aenter__())

        def ask() -> None:
            answer = runner.run(asked.call(GetInventory(cursor=4), Inventory, deadline_s=ANSWER_S))
            assert answer.cursor == 8

        yield ask
        runner.run(client.__aexit__(None, None, None))


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    gone = threading.Event()
    for _ in range(int(within_s / 0.02)):
        if condition():
            return
        gone.wait(0.02)
    raise AssertionError("did not happen in time")


def connect(endpoint: str) -> sockets.socket:
    """Open a tcp connection that sends nothing."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    return sockets.create_connection((host, int(port)), 5)


def test_floods_of_empty_frames_are_refused_and_cost_no_memory(server: Server) -> None:
    with growth(server), raw_dealer(server.tcp, Role.OBSERVER) as peer:
        for round_ in range(3):
            peer.send_multipart([b""] * 200_000)
            until(lambda done=round_ + 1: server.counts()["malformed"] == done)  # type: ignore[misc]
            server.answers(round_)


def test_a_message_of_many_small_frames_is_not_kept(server: Server) -> None:
    with growth(server), raw_dealer(server.tcp, Role.OBSERVER) as peer:
        peer.send_multipart([*request(1), *[b"x" * 20] * 300_000])
        until(lambda: server.counts()["malformed"] == 1)


def test_a_peer_that_keeps_sending_garbage_is_no_longer_read_but_others_are(server: Server) -> None:
    with growth(server), raw_dealer(server.tcp, Role.OBSERVER) as peer:
        for number in range(20_000):
            peer.send_multipart([os.urandom(64), b"body"])
            if number % 4000 == 0:
                server.answers(number)
        until(lambda: (c := server.counts())["malformed"] + c["unread"] == 20_000)
        counts = server.counts()
        assert counts["malformed"] <= STRIKES * (counts["quarantines"] + 1)
        assert counts["quarantines"] >= 1
        # Valid requests from this peer are not read either until the quarantine ends.
        peer.send_multipart(request(1))
        assert not peer.poll(300)


def test_a_peer_that_keeps_sending_forbidden_messages_is_put_into_quarantine(server: Server) -> None:
    with raw_dealer(server.tcp, Role.OBSERVER) as peer:
        for number in range(STRIKES + 10):
            peer.send_multipart(request(number + 1))
        until(lambda: server.counts()["unread"] == 10)
        assert server.counts()["forbidden"] == STRIKES
        assert server.counts()["malformed"] == 0


def test_a_guest_that_reconnects_stays_in_quarantine_and_others_are_served(server: Server) -> None:
    elsewhere = server.tcp.replace("tcp://", "tcp://127.0.0.2:0;")
    for connection in range(4):
        with raw_dealer(server.tcp, Role.OBSERVER) as peer:
            for number in range(STRIKES // 4 + 2):
                peer.send_multipart(request(100 * connection + number + 1))
            until(lambda done=(connection + 1) * (STRIKES // 4 + 2): sum(offences(server)) == done)  # type: ignore[misc]
    assert offences(server) == (STRIKES, 8)
    with raw_dealer(server.tcp, Role.OBSERVER) as peer:
        peer.send_multipart(next(snapshots(1)))
        until(lambda: offences(server) == (STRIKES, 9))
    asyncio.run(take_snapshots(elsewhere, Role.OBSERVER, 1))
    asyncio.run(take_snapshots(server.tcp, Role.OPERATOR, 1))
    server.answers()


def offences(server: Server) -> tuple[int, int]:
    """Return the number of forbidden messages and of messages dropped unread."""
    counts = server.counts()
    return counts["forbidden"], counts["unread"]


def test_many_connections_with_garbage_leave_a_bounded_table(server: Server) -> None:
    with growth(server):
        for _ in range(6):
            with ExitStack() as stack:
                for _ in range(200):
                    stack.enter_context(raw_dealer(server.ipc)).send_multipart([b"garbage"])
                until(lambda: server.counts()["malformed"] % 200 == 0)
        assert server.counts()["malformed"] == 1200
        assert server.counts()["peers"] <= MAX_PEERS


def test_peers_that_connect_and_stay_silent_do_not_delay_others(server: Server) -> None:
    with growth(server), ExitStack() as stack:
        silent = [stack.enter_context(connect(server.tcp)) for _ in range(200)]
        for half in silent[:100]:
            half.sendall(b"\xff\0\0\0\0\0\0\0\0\x7f\3\1CURVE")  # This ZMTP greeting never ends.
        server.answers()
        # The time limit for handshakes closes these connections.
        for each in silent:
            each.settimeout(30)
            while each.recv(4096):
                pass


def test_a_peer_that_never_reads_loses_only_its_own_answers(server: Server) -> None:
    """On a slow machine, the server hangs up before the peer has sent everything, because its pings remain unanswered.
    The peer's socket does not notice that and blocks, because it reads nothing."""
    began = time.monotonic()
    with growth(server), raw_dealer(server.tcp, RCVHWM=1, RCVBUF=4096, SNDTIMEO=2000) as peer:
        try:
            for number in range(60_000):
                peer.send_multipart(request(number + 1))
                if number % 20_000 == 0:
                    server.answers(number)
        except zmq.Again:
            assert time.monotonic() - began > PINGS_S
        server.answers()


def snapshots(number: int, asker: int = 0) -> Iterator[list[bytes]]:
    """Yield different requests from one sender."""
    for request_id in range(1, number + 1):
        frames = codec.encode(GetSnapshot(), request_id=request_id, incarnation=1000 + asker, remaining_s=60.0)
        yield [bytes(frame) for frame in frames]


async def take_snapshots(endpoint: str, role: Role, number: int) -> None:
    """Request `number` snapshots at once."""
    async with asking(endpoint, CLIENT_INCARNATION + 2 + role, role) as client:
        calls = [client.call(GetSnapshot(), Snapshot, deadline_s=ANSWER_S) for _ in range(number)]
        for answer in await asyncio.gather(*calls):
            assert len(str(answer.rows[0].values["text"])) == 200_000


def settled(server: Server, least: int) -> int:
    """Wait until more than `least` answers are lost and the number no longer grows. Return that number."""
    lost: list[int] = []

    def still() -> bool:
        lost.append(server.counts()["lost_replies"])
        return lost[-1] > least and lost[-20:].count(lost[-1]) == 20

    until(still)
    return lost[-1]


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.SERVICE])
def test_large_unread_answers_are_bounded_in_bytes_and_others_get_their_answers(server: Server, role: Role) -> None:
    """1,500 answers of 200 kB wait for one peer. They are kept up to a byte limit, and the rest are dropped."""
    bound = (GUEST_BYTES if role is Role.OBSERVER else SERVICE_BYTES) + CACHED_REPLY_BYTES
    with asking_in_thread(server.tcp) as ask:
        asyncio.run(take_snapshots(server.tcp, Role.SERVICE, 64))
        asyncio.run(take_snapshots(server.tcp, Role.OBSERVER, 8))
        assert server.counts()["lost_replies"] == 0
        before = server.rss_bytes()
        with raw_dealer(server.tcp, role, RCVHWM=1, RCVBUF=4096) as peer:
            for number, frames in enumerate(snapshots(1500)):
                peer.send_multipart(frames)
                if number % 500 == 0:
                    ask()
            lost = settled(server, 1000)
            asyncio.run(take_snapshots(server.tcp, Role.SERVICE, 64))
            asyncio.run(take_snapshots(server.tcp, Role.OBSERVER, 8))
            assert server.counts()["lost_replies"] == lost
            assert server.rss_bytes() - before < bound + (48 << 20)


def test_connections_of_one_observer_share_a_limit_of_unread_bytes_and_others_get_their_answers(server: Server) -> None:
    before = server.rss_bytes()
    with ExitStack() as stack:
        for asker in range(12):
            peer = stack.enter_context(raw_dealer(server.tcp, Role.OBSERVER, RCVHWM=1, RCVBUF=4096))
            for frames in snapshots(100, asker):
                peer.send_multipart(frames)
        lost = settled(server, 300)
        assert server.rss_bytes() - before < GUESTS_BYTES + CACHED_REPLY_BYTES + (48 << 20)
        asyncio.run(take_snapshots(server.tcp, Role.SERVICE, 8))
        asyncio.run(take_snapshots(server.tcp, Role.OPERATOR, 8))
        asyncio.run(take_snapshots(server.tcp.replace("tcp://", "tcp://127.0.0.2:0;"), Role.OBSERVER, 8))
        assert server.counts()["lost_replies"] == lost
    # Closed connections are no longer counted.
    until(lambda: asyncio.run(take_snapshots(server.tcp, Role.OBSERVER, 8)) is None)


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.SERVICE])
def test_a_body_is_not_decoded_if_its_sender_may_not_send_it_or_no_handler_takes_it(server: Server, role: Role) -> None:
    """The message holds 8 MiB of empty lists. Decoded, they would be half a gigabyte of objects. An observer may not
    send it, and the mailbox has no handler for it."""
    head = b"\x82\xa5files\x90\xa6places"
    lists = (8 << 20) - len(head) - 5
    body = head + b"\xdd" + lists.to_bytes(4, "big") + b"\x90" * lists
    envelope = codec.envelope.Envelope(
        type=Located.TYPE, request_id=1, incarnation=2, body_bytes=len(body), total_bytes=len(body)
    ).pack()
    before = server.most_rss_bytes()
    with raw_dealer(server.tcp, role) as peer:
        peer.send_multipart([envelope, body], copy=False)
        assert peer.poll(int(ANSWER_S * 1000))
        assert isinstance(codec.decode(peer.recv_multipart()).body, Error)
    assert server.most_rss_bytes() - before < GROWTH_BYTES


def test_large_invalid_messages_in_a_row_do_not_accumulate(server: Server) -> None:
    body = b"\x80" + b"\xc0" * (7 << 20)
    head = codec.envelope.Envelope(
        type=GetSnapshot.TYPE, request_id=1, incarnation=2, body_bytes=len(body), total_bytes=len(body)
    ).pack()
    with raw_dealer(server.tcp, Role.OBSERVER, SNDHWM=4) as peer:
        before = server.rss_bytes()
        for _ in range(60):
            peer.send_multipart([head, body], copy=False)
        until(lambda: (c := server.counts())["malformed"] + c["unread"] == 60)
        # A few of the messages are in transit at any time.
        assert server.rss_bytes() - before < 3 * GROWTH_BYTES


def test_an_endless_message_loses_its_connection_before_it_fills_the_memory(server: Server) -> None:
    piece = os.urandom(1 << 20)
    before, most = server.rss_bytes(), server.most_rss_bytes()
    with raw_dealer(server.tcp, Role.OBSERVER) as peer:
        peer.send_multipart([piece] * 1024, copy=False)  # libzmq sends nothing until it has the last frame.
        until(lambda: server.counts()["ended_connections"] >= 1)
        server.answers()
    assert server.most_rss_bytes() - most < 3 * GROWTH_BYTES
    until(lambda: server.rss_bytes() - before < GROWTH_BYTES)


def test_strangers_at_the_limit_of_connections_displace_each_other_but_neither_members_nor_newcomers(
    server: Server,
) -> None:
    with asking_in_thread(server.tcp) as ask, ExitStack() as stack:
        ask()
        for _ in range(MOST_CONNECTIONS + 50):
            stack.enter_context(connect(server.tcp))
        until(lambda: server.counts()["ended_connections"] >= 50)
        ask()
        server.answers()


def test_a_service_with_few_descriptors_accepts_new_peers_however_many_strangers_connect(tmp_path: Path) -> None:
    """libzmq aborts a process that has no descriptor left when a peer connects over ipc. In this test, strangers
    without a key try to use up the descriptors.
    """
    raise_descriptor_limit()
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    keys.create(run.keys)
    ipc = run.endpoint("monitor", 0)

    async def newcomer() -> Snapshot:
        async with asking(ipc) as client:
            return await client.call(GetSnapshot(), Snapshot, deadline_s=ANSWER_S)

    service = subprocess.Popen(
        [sys.executable, "-m", "services.monitor", "--run", str(run.path), "--listen", "tcp://127.0.0.1:0"],
        cwd=ROOT, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS)),
    )  # fmt: skip
    try:
        stream = asyncio.run(newcomer()).stream
        log = [json.loads(line) for line in run.log_file("monitor", 0).read_text().splitlines()]
        mailbox = next(line["endpoint"] for line in log if line["event"] == "listens")
        with ExitStack() as stack:
            for _ in range(FEW_DESCRIPTORS // 50):
                for endpoint in (mailbox, stream) * 25:
                    stack.enter_context(connect(endpoint))
                asyncio.run(newcomer())
            assert len(os.listdir(f"/proc/{service.pid}/fd")) < FEW_DESCRIPTORS - 400
        assert service.poll() is None
    finally:
        service.kill()
        service.wait(10)
        run.remove_volatile()


def test_a_connection_that_cannot_be_watched_for_lack_of_descriptors_is_closed_and_counted(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    # While any sockets other than its two listening sockets have an address, the server is still closing connections,
    # which frees descriptors.
    until(lambda: sum(bool(each.laddr) for each in process.net_connections("all")) == 2)
    open_ones = {int(name) for name in os.listdir(f"/proc/{server.process.pid}/fd")}
    free = next(number for number in range(len(open_ones) + 1) if number not in open_ones)
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (free + 1, before[1]))
    with connect(server.tcp) as stranger:
        while stranger.recv(4096):
            pass
    assert server.counts()["ended_connections"] == 1
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)


def test_a_pump_passes_on_the_beginning_of_an_oversize_message_and_continues() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        taker, giver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        taker.bind("inproc://x")
        giver.connect("inproc://x")
        got: list[list[bytes]] = []
        pump = Pump(taker, got.append)
        most = MAX_FRAMES
        giver.send_multipart([b"a"] * (most + 1))
        giver.send_multipart([b"b"] * (2 * SKIP_FRAMES + 7))
        giver.send_multipart([b"c" * (9 << 20), b"c" * (8 << 20), b"c", b"c"])
        giver.send_multipart([b"d", b"d"])
        async with asyncio.timeout(20):
            while len(got) < 4:  # libzmq's thread moves the messages.
                await asyncio.sleep(0.01)
        assert [(frames[0][:1], len(frames)) for frames in got] == [
            (b"a", most + 1), (b"b", most + 1), (b"c", 2), (b"d", 2),
        ]  # fmt: skip
        pump.close()
        context.destroy(0)

    asyncio.run(main())


def test_quarantine_begins_at_the_limit_and_expires_and_slow_offenders_are_forgotten() -> None:
    offenders = Offenders()
    bad, good = (0, Role.SERVICE, b"bad"), (1, Role.SERVICE, b"bad")
    assert [offenders.strike(bad, 0.0) for _ in range(STRIKES)] == [False] * (STRIKES - 1) + [True]
    assert offenders.unheard(bad, 1.0)
    assert not offenders.unheard(good, 1.0)
    assert not offenders.unheard(bad, QUARANTINE_S)
    assert offenders.unread == 1
    slow = (0, Role.OBSERVER, b"10.0.0.1")
    for number in range(10 * STRIKES):
        assert not offenders.strike(slow, number * WINDOW_S / (STRIKES - 2))
    for number in range(3 * MAX_PEERS):
        offenders.strike((0, Role.SERVICE, number.to_bytes(4, "little")), 1e6)
    assert len(offenders) == MAX_PEERS
