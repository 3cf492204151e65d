"""Messages between the service and a process that runs users' code.

Messages are length-prefixed msgpack structs over a socket. `Marks` are memory that both share.

Messages contain only data, so reading them executes nothing. A slot is one call of a user's function in one process.
Slots are numbered from 1, and numbers are not reused.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from enum import StrEnum
from typing import Any

import msgspec

from proto.messages import LossReason
from services.rollout.rewards.score import Score
from services.rollout.user_code.trace import Home
from shared.sample import Sample
from shared.workflow import Message, Sequence, Turn

LENGTH = struct.Struct("<I")
TO_PROCESS_BYTES = 1 << 30
TO_SERVICE_BYTES = 16 << 20
"""Maximum size of a message. Once decoded, a message may take up sixty times as much memory in the service, which hosts
the engine."""
SLOTS = 1 << 16
"""Number of calls after which a process is replaced."""


class Purpose(StrEnum):
    """The purpose of a process's functions, named after the functions' section of the topology."""

    REWARD = "reward"
    WORKFLOW = "workflow"


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once: import path and params of each function, and the time limit for one call in seconds.

    `memory_bytes` limits the memory of all calls together, beyond what the process uses once it is ready. With
    `offline`, a call that connects to a server ends there, and fails as if its judge were unavailable.
    """

    purpose: Purpose
    functions: list[tuple[str, dict[str, Any]]]
    timeout_s: float
    memory_bytes: int
    offline: bool = False

    @property
    def late(self) -> str:
        """The reason why a late call failed."""
        result = "answer" if self.purpose is Purpose.REWARD else "trajectory"
        return f"no {result} within {self.timeout_s:g} s ({self.purpose}.timeout_s)"


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once: the kind and place of each function, or the one-line `error` if one fails to load.

    `certain` says whether another attempt would fail in the same way (`is_certain`). `pid` identifies the process that
    writes its stacks on request.
    """

    error: str = ""
    certain: bool = False
    group: list[bool] = []
    is_async: list[bool] = []
    homes: list[Home] = []
    pid: int = 0


class BeginSample(msgspec.Struct, array_like=True, tag=0):
    """Service -> process: make sample `sample` of the task. `base_url` is the endpoint for this sample only."""

    slot: int
    task_id: str
    sample: int
    row: dict[str, Any]
    base_url: str


class RateSamples(msgspec.Struct, array_like=True, tag=1):
    """Service -> process: call reward function number `function` with one sample, or the samples of a group."""

    slot: int
    function: int
    samples: list[Sample]


class Answered(msgspec.Struct, array_like=True, tag=2):
    """Service -> process: the policy's answer to a call, or the reason why there is none. `refused` names a class of
    REFUSALS."""

    slot: int
    call: int
    turn: Turn | None = None
    refused: str = ""
    why: str = ""


class Captured(msgspec.Struct, array_like=True, tag=3):
    """Service -> process: everything sampled for the slot so far."""

    slot: int
    sequences: list[Sequence]


class GiveUp(msgspec.Struct, array_like=True, tag=4):
    """Service -> process: the slot has been abandoned."""

    slot: int


class CheckLoop(msgspec.Struct, array_like=True, tag=5):
    """Service -> process: a check that the loop is alive."""


class Chat(msgspec.Struct, array_like=True, tag=0):
    """Process -> service: `llm.chat`."""

    slot: int
    call: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None


class CompleteText(msgspec.Struct, array_like=True, tag=1):
    """Process -> service: `llm.complete`."""

    slot: int
    call: int
    prompt: str


class Leave(msgspec.Struct, array_like=True, tag=2):
    """Process -> service: the answer to this call is no longer needed."""

    slot: int
    call: int


class Ask(msgspec.Struct, array_like=True, tag=3):
    """Process -> service: a request for what was captured. The process does nothing else until the answer arrives."""

    slot: int


class Returned(msgspec.Struct, array_like=True, tag=4):
    """Process -> service: the trajectory that ends a workflow. `score` is the workflow's own reward, if any."""

    slot: int
    sequences: list[Sequence]
    score: Score | None
    metrics: dict[str, float]
    state: dict[str, Any]


class Rated(msgspec.Struct, array_like=True, tag=5):
    """Process -> service: the end of a reward call, with one score for each sample."""

    slot: int
    scores: list[Score]


class Failed(msgspec.Struct, array_like=True, tag=6):
    """Process -> service: the end of a slot without a result. `at` and `trace` locate the error in the user's code.

    `retry_after_s` is the time for which a judge asks not to be called (kind JUDGE).
    """

    slot: int
    why: str
    kind: LossReason = LossReason.RAISED
    at: str = ""
    trace: str = ""
    retry_after_s: float = 0.0


class NoMemory(msgspec.Struct, array_like=True, tag=7):
    """Process -> service: the slot reached the memory limit, although other slots may have used up the memory. The
    process exits."""

    slot: int
    at: str


class LoopRuns(msgspec.Struct, array_like=True, tag=8):
    """Process -> service: the answer to a `CheckLoop`."""


ToProcess = BeginSample | RateSamples | Answered | Captured | GiveUp | CheckLoop
Asked = Chat | CompleteText | Leave | Ask
ToService = Asked | Returned | Rated | Failed | NoMemory | LoopRuns


def frame(message: msgspec.Struct, limit_bytes: int) -> bytes:
    """Return `message` prefixed with its length. `limit_bytes` is the size limit for its direction.

    Raises TypeError, ValueError, OverflowError or RecursionError for a message that msgpack cannot encode, and
    ValueError for one above the limit.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > limit_bytes:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {limit_bytes}")
    return LENGTH.pack(len(body)) + body


UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""The exceptions that `frame` raises."""


_CURRENT = struct.Struct("<q")
_TOOLS = struct.Struct("<H")
_BYTES = _CURRENT.size + (SLOTS + 1) * _TOOLS.size  # slots are numbered from 1
_NOBODY = 0


def make_marks() -> int:
    """Create marks and return their descriptor, which both processes use."""
    descriptor = os.memfd_create("rlbus-marks")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class Marks:
    """Memory that shows which call's code is running.

    It outlives the process, so that the service can identify the call that ended the process. Only the process writes
    to it.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _BYTES)
        self._lock = threading.Lock()

    def enter(self, slot: int) -> None:
        """Mark that the loop is running the slot's code."""
        _CURRENT.pack_into(self._map, 0, slot)

    def leave(self) -> None:
        _CURRENT.pack_into(self._map, 0, _NOBODY)

    def tool(self, slot: int, change: int) -> None:
        """Count one running tool more (1) or fewer (-1) for the slot. Any thread may call this."""
        with self._lock:
            at = _CURRENT.size + slot * _TOOLS.size
            _TOOLS.pack_into(self._map, at, max(0, min(0xFFFF, _TOOLS.unpack_from(self._map, at)[0] + change)))

    def current(self) -> int | None:
        """Return the slot whose code the loop is running, or None."""
        slot: int = _CURRENT.unpack_from(self._map, 0)[0]
        return None if slot == _NOBODY else slot

    def tools(self, slot: int) -> int:
        """Return how many of the slot's tools are running."""
        count: int = _TOOLS.unpack_from(self._map, _CURRENT.size + slot * _TOOLS.size)[0]
        return count

    def close(self) -> None:
        self._map.close()
