"""Provides peers for the rpc and actor tests: a small mailbox and a small service, as objects or as processes.

Run as a script: `rpc_actors.py mailbox ENDPOINT` or `rpc_actors.py service --run DIR [--instance N] [...]`. The peers
do not stand in for the product's real services.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[4]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from proto import codec  # noqa: E402
from proto.messages import GetInventory, Inventory, Ping, Pong  # noqa: E402
from shared.actor.process import run_process  # noqa: E402
from shared.actor.service import Service  # noqa: E402
from shared.rpc.client import Client  # noqa: E402
from shared.rpc.mailbox import Call, Mailbox  # noqa: E402
from shared.security import keys as run_keys  # noqa: E402
from shared.security.curve import is_tcp, unlock  # noqa: E402
from shared.security.keys import Keyring  # noqa: E402
from shared.security.roles import Role  # noqa: E402
from shared.security.zap import Gate  # noqa: E402

SERVER_INCARNATION = 11
CLIENT_INCARNATION = 22
DEADLINE_S = 10.0


def double(request: GetInventory, _: Call) -> Inventory:
    return Inventory(tasks=[], cursor=2 * request.cursor)


@contextmanager
def short_directory() -> Iterator[Path]:
    """Yield a directory with a path so short that socket paths in it stay under 107 bytes, however long pytest's
    temporary paths are."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as name:
        yield Path(name)


@functools.cache
def key_folder() -> Path:
    """Return the folder with the keys for this test process's tcp endpoints; it is removed when the process exits."""
    folder = tempfile.mkdtemp(prefix="rlb-keys-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run_keys.create(Path(folder))
    return Path(folder)


@functools.cache
def keyring(role: Role = Role.SERVICE) -> Keyring:
    return run_keys.load(key_folder(), role)


@asynccontextmanager
async def serving(
    endpoint: str, *handlers: tuple[Any, Any], admits: Role = Role.OPERATOR
) -> AsyncIterator[tuple[Mailbox, str]]:
    """Yield a bound mailbox with these (request class, handler) pairs; over tcp it uses `keyring()`."""
    context = zmq.Context()
    mailbox = Mailbox("echo/0", SERVER_INCARNATION)
    for request, handler in handlers:
        mailbox.handle(request, handler)
    gate = Gate(context, keyring()) if is_tcp(endpoint) else None
    try:
        bound = mailbox.bind(context, endpoint, gate=gate, admits=admits)
        yield mailbox, bound
    finally:
        await mailbox.close()
        if gate is not None:
            gate.close()
        context.destroy(0)


@asynccontextmanager
async def asking(
    endpoint: str, incarnation: int = CLIENT_INCARNATION, role: Role = Role.SERVICE
) -> AsyncIterator[Client]:
    context = zmq.Context()
    client = Client(context, endpoint, "echo/0", incarnation, keys=keyring(role) if is_tcp(endpoint) else None)
    try:
        yield client
    finally:
        client.close()
        context.destroy(0)


@contextmanager
def raw_dealer(endpoint: str, role: Role = Role.SERVICE, **options: int) -> Iterator[zmq.Socket[bytes]]:
    """Yield a DEALER socket that sends whatever frames a test gives it. Over tcp it has the key of `role`."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if is_tcp(endpoint):
        unlock(socket, keyring(role))
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(0)


def request(number: int, **header: Any) -> list[Any]:
    """Return the frames of a request, with the fields in `header` replaced in its header."""
    return codec.encode(
        GetInventory(cursor=1),
        **{"request_id": number, "incarnation": CLIENT_INCARNATION, "remaining_s": 10.0, **header},
    )


async def receive(socket: zmq.Socket[bytes], within_s: float = DEADLINE_S) -> list[bytes]:
    """Return the next message from a raw socket without blocking the loop that serves it."""
    ready = await asyncio.get_running_loop().run_in_executor(None, socket.poll, int(within_s * 1000))
    assert ready, f"no message in {within_s} s"
    return socket.recv_multipart()


async def eventually(condition: Any, within_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` holds; fail after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():  # The condition may depend on another process.
            await asyncio.sleep(0.005)


@contextmanager
def process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run this file as a process, which is killed at the end if it is still alive."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **options.pop("env", {})},
        **options,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=10)


def line_of(child: subprocess.Popen[str], within_s: float = 20.0) -> str:
    """Return the next line of the process's output."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], within_s)
    assert ready, f"no output in {within_s} s"
    return child.stdout.readline().strip()


class Echo(Service):
    """A service that prints a line when it begins to serve, and doubles numbers. `ECHO_FAIL` makes its start fail with
    that message."""

    NAME = "echo"
    HEARTBEATS = False

    def __init__(self, run: Any, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.mailbox.handle(GetInventory, double)

    async def start(self) -> None:
        if "ECHO_FAIL" in os.environ:
            raise ValueError(os.environ["ECHO_FAIL"])

    async def serve(self) -> None:
        print(f"serving {os.getpid()}", flush=True)
        await super().serve()


async def _mailbox(endpoint: str) -> None:
    context = zmq.Context()
    mailbox = Mailbox("echo/0", os.getpid())
    mailbox.handle(Ping, lambda _, __: Pong(service="echo", instance=0, incarnation=os.getpid(), state="READY"))
    mailbox.handle(GetInventory, double)
    mailbox.bind(context, endpoint)
    print("bound", flush=True)
    await asyncio.Event().wait()


def _spawn(arguments: list[str]) -> None:
    """Act as a supervisor that starts one service and waits to be killed."""
    with subprocess.Popen([sys.executable, __file__, "service", *arguments]):
        signal.pause()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    sys.argv[1:] = rest
    if what == "mailbox":
        asyncio.run(_mailbox(rest[0]))
    elif what == "spawn":
        _spawn(rest)
    else:
        sys.exit(run_process(Echo, "echo"))
