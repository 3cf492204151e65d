"""Attacks a whole run: peers misbehave in several ways at the mailbox of every process. No process dies, each process
counts the offences and ignores repeat offenders, and training continues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket as sockets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from proto import codec, envelope
from proto.limits import CONTROL
from proto.messages import (
    DrainService,
    Error,
    ErrorCode,
    FinishRun,
    GetInventory,
    GetLog,
    GetSnapshot,
    GetWaits,
    GetWorkerState,
    KillInstance,
    Meet,
    Ping,
    Pong,
    RestartService,
    ScaleService,
    Snapshot,
    StopRun,
    Telemetry,
)
from proto.registry import Message, Request, all_messages
from shared.rpc.client import Client
from shared.rpc.senders import STRIKES
from tests.fuzz.test_hostile_requests import Attacker, sent
from tests.integration.tiny.harness import QUICKSTART
from tests.integration.whole_cluster import Cluster, cluster

PROCESSES = (
    "scheduler", "batch-store", "monitor", "rollout", "reference", "policy-trainer", "policy-trainer-worker/0",
    "policy-trainer-worker/1", "supervisor",
)  # fmt: skip
ORDERS = (FinishRun, StopRun, RestartService, DrainService, ScaleService, KillInstance, GetWorkerState)
"""Requests that the attack leaves out, because any peer with a service's key may send them, and they would stop
processes or replace a driver."""
SILENT = 40
LIFE = 4711
ANSWER_S = 30.0


@dataclass(frozen=True)
class Attack:
    """An attack on `processes`. `requests` is the number of rounds of well-formed messages, and `flood` is the number
    of unread answers."""

    processes: tuple[str, ...]
    requests: int
    flood: int
    settings: tuple[str, ...]


LONG = Attack(PROCESSES, requests=80, flood=3000, settings=("services.policy-trainer.workers=2",))
SHORT = Attack(
    tuple(name for name in PROCESSES if name not in ("reference", "policy-trainer-worker/1")),
    requests=8,
    flood=300,
    settings=("algorithm.kl=null", "services.reference=null"),
)


def endpoint_of(run: Cluster, name: str) -> str:
    service, _, instance = name.partition("/")
    return run.run.endpoint(service, int(instance or 0))


def message(body: Message, request_id: int) -> list[bytes]:
    return [bytes(frame) for frame in codec.encode(body, request_id=request_id, incarnation=LIFE, remaining_s=9)]


def header(kind: int, body: bytes, request_id: int = 1) -> bytes:
    return envelope.Envelope(
        type=kind, request_id=request_id, incarnation=LIFE, body_bytes=len(body), total_bytes=len(body)
    ).pack()


def garbage() -> Iterator[list[bytes]]:
    """Yield messages that no decoder accepts, one of each kind."""
    good, body = message(Ping(), 1)
    nested = b"\x91" * 3000
    yield [os.urandom(64), b"body"]
    yield [b""] * 5000
    yield [good]
    yield [good[:-1], body]
    yield [good, body, b"a frame too many"]
    yield [good, body + b"\xc0"]
    yield [header(Ping.TYPE, nested), nested]
    yield [header(GetInventory.TYPE, b"\x81\xa6cursor\xa1x"), b"\x81\xa6cursor\xa1x"]
    yield [bytes(frame) for frame in codec.encode(Ping(), request_id=1, incarnation=LIFE, flags=envelope.FLAG_REPLY)]


@contextlib.contextmanager
def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()


def answer_of(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(int(ANSWER_S * 1000)), "no answer"
    return socket.recv_multipart()


def replay_an_id_and_name_an_unknown_type(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    """Check that a repeated request gets the same answer, and that a different request under its id is refused as a
    conflict."""
    with dealer(context, endpoint) as peer:
        answers = []
        for body in (Ping(), Ping(), GetInventory(cursor=3)):
            peer.send_multipart(message(body, 77))
            answers.append(answer_of(peer))
        # A message number that only a later release knows is refused with a reason and is not an offence.
        peer.send_multipart([header(60_000, b"\x80", request_id=78), b"\x80"])
        answers.append(answer_of(peer))
    assert answers[0] == answers[1]
    refused = [codec.decode(answer).body for answer in answers[2:]]
    assert [each.code for each in refused if isinstance(each, Error)] == [ErrorCode.CONFLICT, ErrorCode.BAD_REQUEST]


def send_garbage_until_unheard(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    kinds = list(garbage())
    with dealer(context, endpoint) as peer:
        for number in range(2 * STRIKES):
            peer.send_multipart(kinds[number % len(kinds)])
        peer.send_multipart(message(Ping(), 99))
        # Some of the messages are answered with the reason for the refusal.
        heard = [codec.decode(answer_of(peer)).body for _ in range(2)]
        while peer.poll(300):
            heard.append(codec.decode(peer.recv_multipart()).body)
    assert not any(isinstance(each, Pong) for each in heard)


def send_what_is_too_large(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    """Check that one frame over the limit ends the connection, and that many smaller frames are not kept."""
    with dealer(context, endpoint, SNDHWM=2) as peer:
        peer.send_multipart([header(Ping.TYPE, b""), bytes(CONTROL.total_bytes + 1)])
    with dealer(context, endpoint) as peer:
        peer.send_multipart([header(Ping.TYPE, b""), *[bytes(1 << 20)] * 12])
        peer.send_multipart([*message(Ping(), 5), *[b""] * 100_000])


@contextlib.contextmanager
def peers_that_hang_on(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, flood: int) -> Iterator[None]:
    """Open connections that send nothing, send half a greeting, or send `flood` requests and never read the answers."""
    with contextlib.ExitStack() as stack:
        for number in range(SILENT):
            half = stack.enter_context(sockets.socket(sockets.AF_UNIX))
            half.connect(endpoint.removeprefix("ipc://"))
            if number % 2:
                half.sendall(b"\xff\0\0\0")
        deaf = stack.enter_context(dealer(context, endpoint, RCVHWM=1, SNDHWM=100, SNDTIMEO=int(ANSWER_S * 1000)))
        for number in range(flood):
            deaf.send_multipart(message(Ping(), 1000 + number))
        yield


async def send_hostile_values(clients: dict[str, Client], requests: int) -> list[str]:
    """Send well-formed requests of every type with random values. Return the defects."""
    dice = random.Random(11)
    known: dict[str, list[Any]] = {
        "service": ["rollout", "supervisor", "scheduler"],
        "instance": [0, -1, 10**6],
        "round": ["join", "end", "x"],
        "rank": [-1, 2, 10**9],
    }
    attacker = Attacker(dice, known)
    every = all_messages().values()
    kinds = [kind for kind in every if issubclass(kind, Request) and kind not in ORDERS]
    kinds += [Telemetry, *(GetLog, GetWaits, Meet, Ping) * 5]
    outcomes: Counter[str] = Counter()
    defects: set[str] = set()

    async def one(name: str, kind: type[Message]) -> None:
        body = attacker.body(kind)
        if isinstance(body, Meet) and body.rank in (0, 1):
            return  # A peer with a service's key counts as a restarted rank, so the group would be formed again.
        defect = await sent(body, clients[name], outcomes, deadline_s=2.0)
        if defect:
            defects.add(f"{name}: {defect}")

    for _ in range(requests):
        await asyncio.gather(*(one(name, dice.choice(kinds)) for name in clients))
    assert min(outcomes["answered"], outcomes[ErrorCode.BAD_REQUEST]) > requests // 8, outcomes
    return sorted(defects)


async def lives(clients: dict[str, Client]) -> dict[str, int]:
    found = {}
    for name, client in clients.items():
        found[name] = (await client.call(Ping(), Pong, deadline_s=ANSWER_S)).incarnation
    return found


async def hurt_all(run: Cluster, attack: Attack) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    everybody = {name if "/" in name else f"{name}/0" for name in attack.processes}
    clients = {name: Client(context, endpoint_of(run, name), name, LIFE + 1) for name in attack.processes}
    try:
        before = await lives(clients)
        with contextlib.ExitStack() as hanging:
            for name in attack.processes:
                hanging.enter_context(peers_that_hang_on(context, endpoint_of(run, name), attack.flood))
            for name in attack.processes:
                for hurt in (replay_an_id_and_name_an_unknown_type, send_garbage_until_unheard, send_what_is_too_large):
                    await asyncio.to_thread(hurt, context, endpoint_of(run, name))
            assert await lives(clients) == before
            assert not await send_hostile_values(
                {name: client for name, client in clients.items() if name not in ("scheduler", "batch-store")},
                attack.requests,
            )
        assert await lives(clients) == before
        async with asyncio.timeout(ANSWER_S):
            while everybody - await offended(clients["monitor"]):
                await asyncio.sleep(0.2)
    finally:
        for client in clients.values():
            client.close()
        await asyncio.to_thread(context.destroy, 0)


async def offended(monitor: Client) -> set[str]:
    """Return the services that reported offences and a quarantine to the monitor."""
    snapshot = await monitor.call(GetSnapshot(), Snapshot, deadline_s=ANSWER_S)
    return {
        f"{row.service}/{row.instance}"
        for row in snapshot.rows
        if row.topic == "security"
        and float(row.values["malformed"]) >= STRIKES
        and float(row.values["quarantines"]) >= 1
        and float(row.values["unread"]) >= 1
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "attack", [pytest.param(LONG, marks=pytest.mark.long, id="long"), pytest.param(SHORT, id="short")]
)
def test_a_run_survives_peers_that_misbehave_at_every_process(tmp_path: Path, attack: Attack) -> None:
    settings = (
        "run.steps=100000", "algorithm.tasks_per_step=8", "algorithm.group_size=4", "data.eval={}", *attack.settings,
    )  # fmt: skip
    with cluster(QUICKSTART, tmp_path, *settings, limit_s=240) as run:
        run.wait_for("steps", lambda: len(run.rows()) >= 2)
        rows = run.status()["services"]
        asyncio.run(hurt_all(run, attack))
        trained = len(run.rows())
        run.wait_for("more steps", lambda: len(run.rows()) >= trained + 3)
        after = run.status()["services"]
        assert [(row["service"], row["pid"], row["restarts"]) for row in after] == [
            (row["service"], row["pid"], 0) for row in rows
        ]
        assert len(rows) >= len(attack.processes) - 1
