"""What service and reward process say to one another (`services.rollout.user_frames`)."""

from __future__ import annotations

from typing import Any

import msgspec

from services.rollout.rewards.score import Score
from services.rollout.user_trace import Home
from shared.sample import Sample


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once. `memory_bytes`: what calls may take beyond what the process holds once it is ready."""

    functions: list[tuple[str, dict[str, Any]]]
    timeout_s: float
    memory_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once: what the functions are, or the one-line `error` of one that cannot be had. `pid`: who
    writes its stack when it is asked to."""

    group: list[bool]
    is_async: list[bool]
    error: str = ""
    homes: list[Home] = []
    pid: int = 0


class Work(msgspec.Struct, array_like=True):
    """Service -> process: calls of one function, each with the samples of a group or with one sample."""

    function: int
    calls: list[list[Sample]]


class Answer(msgspec.Struct, array_like=True):
    """Process -> service: the scores of call `number` of the Work. `last`: the process ends itself after it."""

    number: int
    scores: list[Score]
    last: bool = False
