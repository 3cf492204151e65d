"""The service's end of one process that runs users' code. Must never wait for it without an end: it is killed, with all
that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from proto.messages import ErrorCode
from services.rollout.user_frames import LENGTH, TO_SERVICE_BYTES
from services.rollout.user_trace import StackFile
from shared.data.gym_process import HASH_SEED
from shared.rpc.errors import RpcError

START_S = 60.0  # importing a user's libraries
START_ATTEMPTS = 3
END_S = 10.0  # above the keeper's own limit
_PACKAGES = Path(__file__).parents[2]
T = TypeVar("T")
GONE = (asyncio.IncompleteReadError, ConnectionError)
"""What `read` and `send` raise once the process is gone."""


class UserProcess:
    """One child, `python -m MODULE FD…`, at the other end of a socket pair. It becomes the keeper of what runs the
    users' code (`services.rollout.keeper`) and ends as that does."""

    def __init__(
        self, child: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self.stack: StackFile | None = None
        """Where it writes its stack; closed with it."""

    @classmethod
    async def start(cls, module: str, descriptors: Sequence[int] = ()) -> UserProcess:
        """`module` is told its socket first, then `descriptors`, which it inherits."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH", ""))))
        passed = (theirs.fileno(), *descriptors)
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *map(str, passed),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # what ends the service's group must not end the keeper
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(child, reader, writer)

    async def ready(self, setup: bytes, what: str) -> bytes:
        """Hand over `setup` and wait for the first answer. `what` is loaded, in errors.

        Raises RpcError(bad_request), one line, for a process that ends or hangs over it; it is ended then.
        """
        try:
            async with asyncio.timeout(START_S):
                await self.send(setup)
                return await self.read()
        except (TimeoutError, *GONE) as error:
            status = await self.end()
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{what}: their process {status} while it loaded them ({type(error).__name__}, limit {START_S:g} s)",
            ) from None
        except asyncio.CancelledError:
            await self.end()
            raise

    def write(self, message: bytes) -> None:
        """Send without waiting for room."""
        self._writer.write(message)

    async def send(self, message: bytes) -> None:
        self._writer.write(message)
        await self._writer.drain()

    async def read(self) -> bytes:
        """The body of the next message. Raises one of GONE once the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > TO_SERVICE_BYTES:
            raise ConnectionError(f"a process of users' code announced {length} bytes, at most {TO_SERVICE_BYTES}")
        return await self._reader.readexactly(length)

    async def end(self, grace_s: float = 0.0) -> str:
        """Kill it and all it started; says how it had ended by itself within `grace_s`, if it had."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._child.wait()
        status = self._child.returncode
        try:
            await self._end_tree()
        finally:
            self._writer.close()
            if self.stack is not None:
                self.stack.close()
        if status is None:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    async def _end_tree(self) -> None:
        """By its keeper; a keeper that does not answer takes at least its child along."""
        try:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(END_S):
                await self._child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()


def decoded(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Raises ConnectionError for bytes that are no message: users' code has written into the socket."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConnectionError(f"a process of users' code sent what is no message: {error}") from None
