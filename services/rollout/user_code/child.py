"""The service's side of one process that runs users' code.

Every wait for the process is bounded. When the time is up, the process is killed with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from proto.messages import ErrorCode
from services.rollout.user_code.frames import LENGTH, TO_PROCESS_BYTES, TO_SERVICE_BYTES, Ready, Setup, frame
from services.rollout.user_code.trace import StackFile
from shared.data.gym_process import HASH_SEED
from shared.rpc.errors import BadInput, RpcError

MODULE = "services.rollout.user_code.process"
START_S = 60.0  # includes the import of a user's libraries
END_S = 10.0  # longer than the keeper's own limit
_PACKAGES = Path(__file__).parents[3]
T = TypeVar("T")
GONE = (asyncio.IncompleteReadError, ConnectionError)
"""Exceptions that `read` raises once the process is gone."""
_READY = msgspec.msgpack.Decoder(Ready)


class UserProcess:
    """A child at the other end of a socket pair. It becomes the keeper of the process that runs the users' code
    (`services.rollout.user_code.keeper`) and ends in the same way as that process does."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stack: StackFile,
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self.stack = stack
        """The file to which the process writes its stack. It is closed together with the process."""

    @classmethod
    async def start(cls, setup: Setup, marks: int) -> tuple[UserProcess, Ready]:
        """Start a process that inherits the descriptor `marks`, and wait until it has loaded its functions.

        Raises a one-line RpcError: BadInput if the functions cannot be loaded, internal if the process ends or hangs in
        the meantime.
        """
        ours, theirs = socket.socketpair()
        stack = StackFile()
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH", ""))))
        passed = (theirs.fileno(), marks, stack.descriptor)
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, setup.purpose, *map(str, passed)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a signal to the service's group must not end the keeper
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        process = cls(child, reader, writer, stack)
        return process, await process._ready(setup)

    async def _ready(self, setup: Setup) -> Ready:
        try:
            async with asyncio.timeout(START_S):
                self.write(frame(setup, TO_PROCESS_BYTES))
                ready = decoded(await self.read(), _READY)
        except (TimeoutError, *GONE) as error:
            status = await self.end()
            raise RpcError(
                ErrorCode.INTERNAL,
                f"{setup.purpose} {', '.join(path for path, _ in setup.functions)}: their process {status} while "
                f"loading them ({type(error).__name__}, limit {START_S:g} s)",
            ) from None
        except asyncio.CancelledError:
            await self.end()
            raise
        if ready.error:
            await self.end()
            raise BadInput(ready.error) if ready.certain else RpcError(ErrorCode.INTERNAL, ready.error)
        self.stack.belongs_to(ready.pid)
        return ready

    def write(self, message: bytes) -> None:
        """Send without waiting for buffer space."""
        self._writer.write(message)

    async def read(self) -> bytes:
        """Return the body of the next message. Raises one of GONE once the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > TO_SERVICE_BYTES:
            raise ConnectionError(
                f"a process that runs users' code announced {length} bytes; the limit is {TO_SERVICE_BYTES}"
            )
        return await self._reader.readexactly(length)

    async def end(self, grace_s: float = 0.0) -> str:
        """Kill the process and everything that it started. Return how it ended: on its own within `grace_s`, or because
        it was killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._child.wait()
        status = self._child.returncode
        try:
            await self._end_tree()
        finally:
            self._writer.close()
            self.stack.close()
        if status is None:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    async def _end_tree(self) -> None:
        """Stop the process tree through its keeper. If the keeper does not respond, kill it, and its child with it."""
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
    """Decode a message. Raises ConnectionError if it is invalid, which means that users' code has written to the
    socket."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConnectionError(f"a process that runs users' code sent an invalid message: {error}") from None
