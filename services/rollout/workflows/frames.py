"""Messages between the service and a workflow process, framed by `services.rollout.user_frames`.

A slot is one attempt at one sample in one process. Slots are numbered from 1, and numbers are not reused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.rollout.rewards.score import Score
from shared.workflow import Message, Sequence, Turn

SLOTS = 1 << 16
"""Number of samples after which a process is replaced."""


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once. `memory_bytes` limits the memory of all its samples together."""

    function: str
    params: dict[str, Any]
    timeout_s: float
    memory_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once. `error` is one line if the workflow cannot be loaded, else empty."""

    error: str = ""


class Begin(msgspec.Struct, array_like=True, tag=0):
    """Service -> process: make sample `sample` of the task. `base_url` is the endpoint of this sample alone."""

    slot: int
    task_id: str
    sample: int
    row: dict[str, Any]
    base_url: str


class Said(msgspec.Struct, array_like=True, tag=1):
    """Service -> process: the policy's answer to a call, or why there is none. `refused` names a class of REFUSALS."""

    slot: int
    call: int
    turn: Turn | None = None
    refused: str = ""
    why: str = ""


class Captured(msgspec.Struct, array_like=True, tag=2):
    """Service -> process: everything sampled for the slot so far."""

    slot: int
    sequences: list[Sequence]


class GiveUp(msgspec.Struct, array_like=True, tag=3):
    """Service -> process: the slot has been abandoned."""

    slot: int


class Ping(msgspec.Struct, array_like=True, tag=4):
    """Service -> process: a check that the loop is alive."""


class Chat(msgspec.Struct, array_like=True, tag=0):
    """Process -> service: `llm.chat`."""

    slot: int
    call: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None


class Complete(msgspec.Struct, array_like=True, tag=1):
    """Process -> service: `llm.complete`."""

    slot: int
    call: int
    prompt: str


class Leave(msgspec.Struct, array_like=True, tag=2):
    """Process -> service: the answer to this call is no longer needed."""

    slot: int
    call: int


class Ask(msgspec.Struct, array_like=True, tag=3):
    """Process -> service: a request for what was captured. The process does nothing else until it is answered."""

    slot: int


class Returned(msgspec.Struct, array_like=True, tag=4):
    """Process -> service, ends a slot with its trajectory. `score` is the workflow's own reward, if any."""

    slot: int
    sequences: list[Sequence]
    score: Score | None
    metrics: dict[str, float]
    state: dict[str, Any]


class Failed(msgspec.Struct, array_like=True, tag=5):
    """Process -> service, ends a slot without a trajectory. `at` and `trace` locate the error in the user's code."""

    slot: int
    why: str
    at: str = ""
    trace: str = ""


class NoMemory(msgspec.Struct, array_like=True, tag=6):
    """Process -> service: the slot met the memory limit, which other slots may have used up. The process exits."""

    slot: int


class Pong(msgspec.Struct, array_like=True, tag=7):
    """Process -> service: the answer to a Ping."""


ToProcess = Begin | Said | Captured | GiveUp | Ping
ToService = Chat | Complete | Leave | Ask | Returned | Failed | NoMemory | Pong
