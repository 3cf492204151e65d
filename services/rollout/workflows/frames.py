"""What service and workflow process say to one another (`services.rollout.user_frames`). A slot is one attempt of one
sample in one process; its number, from 1 on, is never used again there."""

from __future__ import annotations

from typing import Any

import msgspec

from services.rollout.rewards.score import Score
from shared.workflow import Message, Sequence, Turn

SLOTS = 1 << 16
"""Samples of one process, one after the other; then it is replaced."""


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once. `memory_bytes`: what all its samples may take together."""

    function: str
    params: dict[str, Any]
    timeout_s: float
    memory_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once; `error`, one line, for a workflow that cannot be had."""

    error: str = ""


class Begin(msgspec.Struct, array_like=True, tag=0):
    """Service -> process: make sample `sample` of the task. `base_url`: the sample's own endpoint."""

    slot: int
    task_id: str
    sample: int
    row: dict[str, Any]
    base_url: str


class Said(msgspec.Struct, array_like=True, tag=1):
    """Service -> process: the policy's answer to a call, or why there is none (`refused`, a class of REFUSALS)."""

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
    """Service -> process: nobody waits for the slot any more."""

    slot: int


class Ping(msgspec.Struct, array_like=True, tag=4):
    """Service -> process: is the loop alive?"""


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
    """Process -> service: nobody waits for the answer to this call any more."""

    slot: int
    call: int


class Ask(msgspec.Struct, array_like=True, tag=3):
    """Process -> service: what was captured? The process does nothing else until it is answered."""

    slot: int


class Returned(msgspec.Struct, array_like=True, tag=4):
    """Process -> service, the end of a slot: its trajectory. `score`: the workflow's own reward."""

    slot: int
    sequences: list[Sequence]
    score: Score | None
    metrics: dict[str, float]
    state: dict[str, Any]


class Failed(msgspec.Struct, array_like=True, tag=5):
    """Process -> service, the end of a slot: why it has no trajectory. `at`, `trace`: where in the user's code."""

    slot: int
    why: str
    at: str = ""
    trace: str = ""


class NoMemory(msgspec.Struct, array_like=True, tag=6):
    """Process -> service: the slot met the limit of memory, whoever has taken it; the process ends itself."""

    slot: int


class Pong(msgspec.Struct, array_like=True, tag=7):
    """Process -> service: the loop has come round."""


ToProcess = Begin | Said | Captured | GiveUp | Ping
ToService = Chat | Complete | Leave | Ask | Returned | Failed | NoMemory | Pong
