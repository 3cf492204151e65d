"""The service's side of one process that runs users' code.

Every wait for the process is bounded. It hands calls to the process, notices when the process hangs or dies, and
identifies the call that may be the cause, so that other calls are not lost with it. When the time is up, the process is
killed with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from proto.messages import ErrorCode, LossReason, WaitKind, WaitRow
from services.rollout.user_code import frames
from services.rollout.user_code.blocking import BlockedTime, explained, thread_times
from services.rollout.user_code.frames import Failed, Marks, Purpose, Rated, Ready, Returned, Setup, frame
from services.rollout.user_code.trace import StackFile, hangs_at, users_stack
from shared.data.gym_process import HASH_SEED
from shared.rpc.errors import BadInput, RpcError
from shared.workflow import WorkflowError

MODULE = "services.rollout.user_code.process"
START_S = 60.0  # includes the import of a user's libraries
END_S = 10.0  # longer than the keeper's own limit
_PACKAGES = Path(__file__).parents[3]
T = TypeVar("T")
GONE = (asyncio.IncompleteReadError, ConnectionError)
"""Exceptions that `UserProcess.read` raises once the process is gone."""
WATCH_S = 0.25
GRACE_S = 0.5  # tolerance for calls that are late because the machine is busy, or that clean up after their timeout
STALL_S = 10.0
"""Maximum seconds for which a workflow may block the loop of its process (`BlockedTime`)."""
PATIENCE = 4
"""Maximum factor by which the load of the machine may lengthen the time limit of a call."""
LAST_STACK_S = 5.0
"""Maximum seconds that the end of a process waits for the stack that shows why it hangs; on a busy machine, writing one
takes long."""
LOOK_S = 1.0
"""Number of seconds after which a call's process is asked for its stack, to show which code it is running."""
LEFT_TOOLS = 64
"""Number of abandoned tools after which the process is replaced. Each of them occupies a thread."""
LATE_CALLS = 4
"""Number of late calls after which the process is replaced. Each of them may have left a thread behind, and a loop may
have only five threads for `asyncio.to_thread`."""
_READY = msgspec.msgpack.Decoder(Ready)
_MESSAGE: msgspec.msgpack.Decoder[frames.ToService] = msgspec.msgpack.Decoder(frames.ToService)


class UserProcess:
    """A child at the other end of a socket pair. It becomes the keeper of the process that runs the users' code
    (`services.rollout.user_code.confined`) and ends in the same way as that process does."""

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
    async def start(
        cls, setup: Setup, marks: int, environment: Mapping[str, str], output: int | None
    ) -> tuple[UserProcess, Ready]:
        """Start a process that inherits the descriptor `marks`, and wait until it has loaded its functions.

        `environment` and `output` are those of `UserHost.start`.

        Raises a one-line RpcError: BadInput if the functions cannot be loaded, internal if the process ends or hangs in
        the meantime.
        """
        ours, theirs = socket.socketpair()
        stack = StackFile()
        path = os.pathsep.join(filter(None, (str(_PACKAGES), environment.get("PYTHONPATH", ""))))
        passed = (theirs.fileno(), marks, stack.descriptor)
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, setup.purpose, *map(str, passed)),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=output,
                pass_fds=passed,
                start_new_session=True,  # a signal to the service's group must not end the keeper
                env={**environment, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        process = cls(child, reader, writer, stack)
        return process, await process._ready(setup)

    async def _ready(self, setup: Setup) -> Ready:
        try:
            async with asyncio.timeout(START_S):
                self.write(frame(setup, frames.TO_PROCESS_BYTES))
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
        (length,) = frames.LENGTH.unpack(await self._reader.readexactly(frames.LENGTH.size))
        if length > frames.TO_SERVICE_BYTES:
            raise ConnectionError(
                f"a process that runs users' code announced {length} bytes; the limit is {frames.TO_SERVICE_BYTES}"
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


class Work(Protocol):
    """One call of a user's function, in one process."""

    function: int
    """Number of the function in the process."""

    def begin(self, slot: int) -> frames.BeginSample | frames.RateSamples:
        """Return the message that begins the call."""

    def asked(self, message: frames.Asked, host: UserHost) -> None:
        """Handle a request from the running call."""

    def end(self) -> None:
        """Clean up: the call has ended or been abandoned."""


@dataclass(frozen=True)
class Broken:
    """The process ended during the call. `suspect` means that the call may be the cause, and `certain` that it is.
    `failed` is the end of the call that is the cause."""

    failed: Failed
    suspect: bool
    certain: bool


Ended = Returned | Rated | Failed


@dataclass(eq=False)
class _LiveCall:
    work: Work
    began: float
    deadline: float
    ended: asyncio.Future[Ended | Broken]
    late: bool = False


class UserHost:
    """One process and its calls. It is used only on the service's loop."""

    def __init__(self, process: UserProcess, ready: Ready, marks: Marks, setup: Setup) -> None:
        self._process = process
        self._marks = marks
        self._setup = setup
        self._stall_s = setup.timeout_s + GRACE_S
        if setup.purpose is Purpose.WORKFLOW:  # a workflow's code must not block the loop, which other samples share
            self._stall_s = min(STALL_S, setup.timeout_s)
        self._live: dict[int, _LiveCall] = {}
        self._slot = 0
        self._left_tools = 0
        self._late_calls = 0
        self._silent_rounds = 0
        self._blocked = BlockedTime()
        """How long the loop has been blocked in these rounds."""
        self._looked_at = 0.0
        self._times = thread_times(ready.pid)
        """The times of the loop's thread at `_looked_at` (loop time)."""
        self._no_memory: frames.NoMemory | None = None
        self.ready = ready
        self.broken = False
        """Whether the process ended during calls."""
        self.leaving = asyncio.Event()
        """Event that is set once the process accepts no more calls."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve())
        """Task that serves the process and ends with it."""

    @classmethod
    async def start(
        cls, setup: Setup, *, environment: Mapping[str, str] = os.environ, output: int | None = None
    ) -> UserHost:
        """Start a process. Raises a one-line RpcError(bad_request) if its functions cannot be loaded.

        `output` takes what users' code prints: a descriptor, `subprocess.DEVNULL`, or None for this process's standard
        error.
        """
        descriptor = frames.make_marks()
        try:
            marks = Marks(descriptor)
            process, ready = await UserProcess.start(setup, descriptor, environment, output)
        finally:
            os.close(descriptor)
        return cls(process, ready, marks, setup)

    @property
    def load(self) -> int:
        """Number of calls in the process."""
        return len(self._live)

    @property
    def served(self) -> int:
        """Number of calls that the process has been given so far."""
        return self._slot

    async def make(self, work: Work) -> Ended | Broken:
        """Make a call and return how it ended. Cancelling the coroutine abandons the call."""
        if self.task.done():
            failed = Failed(0, "its process has ended", LossReason.CRASHED)
            return Broken(failed, suspect=False, certain=False)
        self._slot += 1
        slot = self._slot
        if slot == frames.SLOTS:
            self.leaving.set()
        loop = asyncio.get_running_loop()
        # Plain functions are called one after another, so the time of each starts when the previous one ends.
        limit_s = self._setup.timeout_s + 2 * GRACE_S if self.ready.is_async[work.function] else float("inf")
        live = _LiveCall(work, loop.time(), loop.time() + limit_s, loop.create_future())
        try:
            try:
                message = frame(work.begin(slot), frames.TO_PROCESS_BYTES)
            except frames.UNFIT as error:
                what = "sample" if self._setup.purpose is Purpose.REWARD else "row"
                return Failed(slot, f"the {what} cannot be handed to a process: {error}", LossReason.ANSWER)
            self._live[slot] = live
            self._process.write(message)
            return await live.ended
        finally:
            work.end()
            self._live.pop(slot, None)
            if not self.task.done():
                if live.late or live.ended.cancelled():
                    self.send(frames.GiveUp(slot))
                self._left_tools += self._marks.tools(slot)
                if self._left_tools >= LEFT_TOOLS:
                    self.leaving.set()

    async def waits(self) -> list[WaitRow]:
        """Return a row that shows how long the process has been working on its oldest call, and which code it is
        running."""
        if not self._live:
            return []
        slot = self._marks.current()
        live = self._live.get(slot or 0) or min(self._live.values(), key=lambda call: call.began)
        began, home = min(call.began for call in self._live.values()), self.ready.homes[live.work.function]
        since_s = asyncio.get_running_loop().time() - began
        at = hangs_at(await self._process.stack.read() if since_s > LOOK_S else "", home)
        text = (
            f"process {self.ready.pid} is working on {len(self._live)} {self._setup.purpose} calls, "
            f"at {at or 'its start'}"
        )
        return [WaitRow(WaitKind.CODE, text, since_s, self._setup.timeout_s)]

    def send(self, message: frames.ToProcess) -> None:
        self.write(frame(message, frames.TO_PROCESS_BYTES))

    def write(self, message: bytes) -> None:
        """Send a framed message."""
        self._process.write(message)

    async def end(self) -> None:
        """Kill the process, which ends all its calls."""
        if not self._ended.done():
            self._ended.set_result(None)
        await asyncio.wait({self.task})

    async def _serve(self) -> None:
        """Serve the process until it dies, hangs, or is leaving and has no calls left."""
        reading = asyncio.create_task(self._read())
        either: set[asyncio.Future[Any]] = {reading, self._ended}
        hung = False
        try:
            while not hung and not (self.leaving.is_set() and not self._live):
                if (await asyncio.wait(either, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    break
                hung = self._watch()
        finally:
            self.leaving.set()
            gone = reading.done()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            stack = await self._process.stack.read(LAST_STACK_S) if hung else ""
            suspects = self._suspects()
            # The socket closes a moment before the exit status is available.
            status = await self._process.end(GRACE_S if gone else 0.0)
            for slot, live in self._live.items():
                if not live.ended.done():
                    self.broken = True
                    live.ended.set_result(self._broken(slot, live, suspects, hung, status, stack))
            self._marks.close()

    def _broken(self, slot: int, live: _LiveCall, suspects: set[int], hung: bool, status: str, stack: str) -> Broken:
        home = self.ready.homes[live.work.function]
        suspect, certain = slot in suspects, suspects == {slot}
        if self._no_memory is not None:
            failed = Failed(slot, self._out_of_memory, LossReason.MEMORY, self._no_memory.at)
            return Broken(failed, suspect, certain=False)
        if hung:
            why, blocked_s = self._setup.late, self._blocked.total_s
            if blocked_s <= self._stall_s:
                silent_s = self._silent_rounds * WATCH_S
                why = f"{why}; its thread had no processor, or was stopped, for most of {silent_s:.0f} s"
            elif self._setup.purpose is Purpose.WORKFLOW:
                what = explained(self._blocked, stack, home)
                why = f"blocked the loop of its process for {self._stall_s:g} s, {what}"
            at = hangs_at(stack, home)
            return Broken(Failed(slot, why, LossReason.TIMEOUT, at, users_stack(stack, home)), suspect, certain)
        why = f"took its process down: it {status}"
        # A plain function is alone in its process, except for what earlier calls have left behind.
        certain = certain and not self.ready.is_async[live.work.function]
        return Broken(Failed(slot, why, LossReason.CRASHED, hangs_at("", home)), suspect, certain)

    @property
    def _out_of_memory(self) -> str:
        if self._setup.purpose is Purpose.REWARD:
            return "needed more memory than reward.memory allows (MemoryError)"
        return "reached the memory limit of its process (workflow.memory)"

    # ---- messages from the process

    async def _read(self) -> None:
        while True:
            try:
                message = decoded(await self._process.read(), _MESSAGE)
            except GONE:
                return
            self._silent_rounds = 0
            match message:
                case frames.LoopRuns():
                    pass
                case frames.NoMemory():
                    self._no_memory = message
                case frames.Chat() | frames.CompleteText() | frames.Leave() | frames.Ask():
                    self._asked(message)
                case Returned() | Rated() | Failed():
                    self._finish(message)

    def _asked(self, message: frames.Asked) -> None:
        live = self._live.get(message.slot)
        if live is not None:
            live.work.asked(message, self)
        elif isinstance(message, frames.Ask):
            self.send(frames.Captured(message.slot, []))
        elif not isinstance(message, frames.Leave):
            why = "the sample has ended"
            self.send(frames.Answered(message.slot, message.call, refused=WorkflowError.__name__, why=why))

    def _finish(self, ended: Ended) -> None:
        live = self._live.get(ended.slot)
        if live is not None and not live.ended.done():
            live.ended.set_result(ended)
        if isinstance(ended, Failed) and ended.kind is LossReason.TIMEOUT:
            self._late_calls += 1
            if self._late_calls == LATE_CALLS:
                self.leaving.set()

    # ---- hangs and deaths

    def _watch(self) -> bool:
        """Return whether the process is hanging and must be ended."""
        now, times = asyncio.get_running_loop().time(), thread_times(self.ready.pid)
        if self._silent_rounds:
            self._blocked = self._blocked.then(self._times, times, now - self._looked_at, WATCH_S)
        else:
            self._blocked = BlockedTime()
            self.send(frames.CheckLoop())
        self._looked_at, self._times = now, times
        # Silence is counted in rounds, because the answer might be in the socket if this process itself was suspended.
        silent_s = self._silent_rounds * WATCH_S
        self._silent_rounds += 1
        if self._blocked.total_s > self._stall_s or silent_s > PATIENCE * (self._setup.timeout_s + GRACE_S):
            return True
        if silent_s <= 2 * WATCH_S:  # otherwise late calls are not to blame
            for slot, live in self._live.items():
                if now > live.deadline and not live.ended.done():
                    self._fail_late(slot, live)
        return False

    def _fail_late(self, slot: int, live: _LiveCall) -> None:
        """Fail a call that ignored its timeout. On the first round, its answer may still be in the socket."""
        if not live.late:
            live.late = True
            return
        self.leaving.set()
        live.ended.set_result(Failed(slot, self._setup.late, LossReason.TIMEOUT))

    def _suspects(self) -> set[int]:
        """Return the slots that may have ended the process: those whose code or tools are running."""
        if self._no_memory is not None:
            return {self._no_memory.slot}
        current = self._marks.current()  # possibly code left behind by a call that has ended
        return {slot for slot in self._live if slot == current or self._marks.tools(slot)}


def decoded(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode a message. Raises ConnectionError if it is invalid, which means that users' code has written to the
    socket."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConnectionError(f"a process that runs users' code sent an invalid message: {error}") from None
