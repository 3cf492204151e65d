"""The service's side of one workflow process.

It hands samples to the process, answers their calls, notices when the process hangs or dies, and names the samples that
may be the cause, so that the others are not lost with them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from proto.messages import ErrorCode
from services.rollout.user_frames import TO_PROCESS_BYTES, UNFIT, frame
from services.rollout.user_process import GONE, UserProcess, decoded
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.frames import (
    SLOTS,
    Ask,
    Begin,
    Captured,
    Chat,
    Complete,
    Failed,
    GiveUp,
    Leave,
    NoMemory,
    Ping,
    Pong,
    Ready,
    Returned,
    Said,
    Setup,
    ToProcess,
    ToService,
)
from services.rollout.workflows.marks import Marks, make_marks
from shared.rpc.errors import RpcError
from shared.workflow import ContextFull, Turn, WorkflowError

MODULE = "services.rollout.workflows.process"
WATCH_S = 0.25
GRACE_S = 1.0  # for a workflow to clean up after its time is over
STALL_S = 10.0
_READY = msgspec.msgpack.Decoder(Ready)
_MESSAGE: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
LEFT_TOOLS = 64
"""Number of abandoned tools after which the process is replaced. Each holds a thread."""


class Endpoint(Protocol):
    """Where external agents call the policy: `services.rollout.openai_endpoint`."""

    def open(self, calls: SampleCalls) -> str:
        """Return the base URL of one sample's calls, the same each time. May be called from any thread."""

    def close(self, calls: SampleCalls) -> None: ...


@dataclass(frozen=True)
class Job:
    """One sample to make. `calls` returns new `SampleCalls` for each attempt."""

    task_id: str
    sample: int
    row: dict[str, Any]
    calls: Callable[[], SampleCalls]

    @property
    def name(self) -> str:
        return f"{self.task_id}/{self.sample}"


@dataclass(frozen=True)
class Broken:
    """The process ended while it had samples. `suspect`: this one may be the cause; `certain`: it is the cause."""

    why: str
    suspect: bool
    certain: bool = False


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended, and the calls made in it."""

    ended: Returned | Failed | Broken
    calls: SampleCalls


@dataclass(eq=False)
class _Live:
    job: Job
    calls: SampleCalls
    deadline: float
    ended: asyncio.Future[Returned | Failed | Broken]
    under_way: dict[int | None, asyncio.Task[None]] = field(default_factory=dict)
    late: bool = False


class WorkflowProcess:
    """One process and its samples. Belongs to the service's loop."""

    def __init__(self, process: UserProcess, marks: Marks, setup: Setup, endpoint: Endpoint) -> None:
        self._process = process
        self._marks = marks
        self._setup = setup
        self._endpoint = endpoint
        self._live: dict[int, _Live] = {}
        self._slot = 0
        self._left_tools = 0
        self._silent_rounds = 0
        self._no_memory: int | None = None
        self.broken = False
        """Whether the process ended while it had samples."""
        self.leaving = asyncio.Event()
        """Set once the process takes no more samples."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve())
        """Serves the process, and ends with it."""

    @classmethod
    async def start(cls, setup: Setup, endpoint: Endpoint) -> WorkflowProcess:
        """Start a process. Raises RpcError(bad_request), in one line, if the workflow cannot be loaded."""
        descriptor = make_marks()
        try:
            marks = Marks(descriptor)
            process = await UserProcess.start(MODULE, [descriptor])
        finally:
            os.close(descriptor)
        ready = decoded(await process.ready(frame(setup, TO_PROCESS_BYTES), f"workflow {setup.function!r}"), _READY)
        if ready.error:
            await process.end()
            raise RpcError(ErrorCode.BAD_REQUEST, ready.error)
        return cls(process, marks, setup, endpoint)

    @property
    def load(self) -> int:
        """Number of samples in the process."""
        return len(self._live)

    @property
    def served(self) -> int:
        """Number of samples that the process was given so far."""
        return self._slot

    async def make(self, job: Job) -> Attempt:
        """Make one attempt at a sample. Cancelling this abandons the sample."""
        self._slot += 1
        slot = self._slot
        if slot == SLOTS:
            self.leaving.set()
        calls = job.calls()
        loop = asyncio.get_running_loop()
        live = _Live(job, calls, loop.time() + self._setup.timeout_s + GRACE_S, loop.create_future())
        try:
            begin = Begin(slot, job.task_id, job.sample, job.row, self._endpoint.open(calls))
            message = frame(begin, TO_PROCESS_BYTES)
        except UNFIT as error:
            return Attempt(Failed(slot, f"the row cannot be handed to a process: {error}"), calls)
        self._live[slot] = live
        self._process.write(message)
        try:
            return Attempt(await live.ended, calls)
        finally:
            self._close(slot, live)

    async def end(self) -> None:
        """Kill the process with all its samples."""
        if not self._ended.done():
            self._ended.set_result(None)
        await asyncio.wait({self.task})

    # ---- messages of the process

    async def _serve(self) -> None:
        """Serve the process until it dies, hangs, or is leaving and has no samples left."""
        reading = asyncio.create_task(self._read())
        either: set[asyncio.Future[Any]] = {reading, self._ended}
        why, hung = "", False
        try:
            while not hung and not (self.leaving.is_set() and not self._live):
                if (await asyncio.wait(either, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    break
                why = self._watch()
                hung = bool(why)
        finally:
            self.leaving.set()
            gone = reading.done()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            suspects = self._suspects()
            # The socket closes a moment before the exit status is available.
            status = await self._process.end(GRACE_S if gone else 0.0)
            if self._no_memory is not None:
                why = "met the limit of memory of its process (workflow.memory)"
            why = why or f"took its process down: it {status}"
            self.broken = bool(self._live)
            for slot, live in list(self._live.items()):
                certain = hung and suspects == {slot}
                if not live.ended.done():
                    live.ended.set_result(Broken(why, slot in suspects, certain))
            self._marks.close()

    async def _read(self) -> None:
        while True:
            try:
                message = decoded(await self._process.read(), _MESSAGE)
            except GONE:
                return
            if isinstance(message, Pong):
                self._silent_rounds = 0
            elif isinstance(message, NoMemory):
                self._no_memory = message.slot
            elif (live := self._live.get(message.slot)) is not None:
                self._handle(live, message)
            elif isinstance(message, Ask):
                self._send(Captured(message.slot, []))
            elif isinstance(message, Chat | Complete):
                why = "the sample has ended"
                self._send(Said(message.slot, message.call, refused=WorkflowError.__name__, why=why))

    def _handle(self, live: _Live, message: Chat | Complete | Leave | Ask | Returned | Failed) -> None:
        if isinstance(message, Chat | Complete):
            self._begin(live, message.call, self._answer(live, message))
        elif isinstance(message, Leave):
            if message.call in live.under_way:
                live.under_way[message.call].cancel()
        elif isinstance(message, Ask):
            self._begin(live, None, self._send_captured(live, message.slot))
        elif not live.ended.done():
            live.ended.set_result(message)

    def _begin(self, live: _Live, call: int | None, work: Coroutine[Any, Any, None]) -> None:
        task = live.under_way[call] = asyncio.create_task(work)
        task.add_done_callback(lambda _: live.under_way.pop(call, None))

    async def _send_captured(self, live: _Live, slot: int) -> None:
        try:
            shown = await live.calls.captured(lambda sequences: frame(Captured(slot, sequences), TO_PROCESS_BYTES))
        except asyncio.CancelledError:
            shown = frame(
                Captured(slot, []), TO_PROCESS_BYTES
            )  # abandoned, but the whole process waits for this answer
        self._process.write(shown)

    async def _answer(self, live: _Live, asked: Chat | Complete) -> None:
        turn: Turn | None = None
        refused = why = ""
        try:
            if isinstance(asked, Chat):
                turn = await live.calls.chat(asked.messages, asked.tools)
            else:
                turn = await live.calls.complete(asked.prompt)
        except (ContextFull, WorkflowError) as error:
            refused, why = type(error).__name__, str(error)
        except Exception as error:  # an error of the call, raised in the workflow
            refused, why = "", f"{type(error).__name__}: {error}"
        self._send(Said(asked.slot, asked.call, turn, refused, why))

    def _send(self, message: ToProcess) -> None:
        self._process.write(frame(message, TO_PROCESS_BYTES))

    # ---- hangs and deaths

    def _watch(self) -> str:
        """Return why the process must end, or an empty string."""
        if not self._silent_rounds:
            self._send(Ping())
        # Counted in rounds, not by the clock: if this process itself was suspended, the answer may be in the socket.
        silent_s = self._silent_rounds * WATCH_S
        self._silent_rounds += 1
        limit_s = min(STALL_S, self._setup.timeout_s)
        if silent_s > limit_s:
            return f"kept the loop of its process for {limit_s:g} s; await ctx.call(tool, ...) instead of calling it"
        if silent_s <= 2 * WATCH_S:  # otherwise the loop is blocked, and late samples are not to blame
            now = asyncio.get_running_loop().time()
            for slot, live in self._live.items():
                if now > live.deadline and not live.ended.done():
                    self._fail_late(slot, live)
        return ""

    def _fail_late(self, slot: int, live: _Live) -> None:
        """Fail a sample that ignored its timeout. On the first call, its answer may still be in the socket."""
        if not live.late:
            live.late = True
            return
        self.leaving.set()
        why = f"no trajectory within {self._setup.timeout_s:g} s (workflow.timeout_s)"
        live.ended.set_result(Failed(slot, why))

    def _suspects(self) -> set[int]:
        """Return the slots that may have ended the process: those whose code or tools run, or all if none do."""
        if self._no_memory is not None:
            return {self._no_memory}
        found = {slot for slot in self._live if self._marks.tools(slot)}
        current = self._marks.current()
        if current is not None:  # possibly code that an ended sample left behind
            found.add(current)
        return found or set(self._live)

    def _close(self, slot: int, live: _Live) -> None:
        live.calls.closed = f"the sample {live.job.name} has ended"
        self._endpoint.close(live.calls)
        for call in list(live.under_way.values()):
            call.cancel()
        del self._live[slot]
        if self.task.done():
            return
        self._send(GiveUp(slot))
        self._left_tools += self._marks.tools(slot)
        if self._left_tools >= LEFT_TOOLS:
            self.leaving.set()
