"""Messages between the service and a reward process, framed by `services.rollout.user_frames`."""

from __future__ import annotations

from typing import Any

import msgspec

from services.rollout.rewards.score import Score
from services.rollout.user_trace import Home
from shared.sample import Sample


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once. `memory_bytes`: limit for calls, beyond the memory of the ready process."""

    functions: list[tuple[str, dict[str, Any]]]
    timeout_s: float
    memory_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once: the kinds of the functions, or the one-line `error` of one that cannot be loaded.

    `pid` is the process that writes its stacks on request.
    """

    group: list[bool]
    is_async: list[bool]
    error: str = ""
    homes: list[Home] = []
    pid: int = 0


class Work(msgspec.Struct, array_like=True):
    """Service -> process: calls of one function. Each call has one sample, or the samples of a group."""

    function: int
    calls: list[list[Sample]]


class Answer(msgspec.Struct, array_like=True):
    """Process -> service: the scores of call `number` of the Work. After the `last` answer the process exits."""

    number: int
    scores: list[Score]
    last: bool = False
