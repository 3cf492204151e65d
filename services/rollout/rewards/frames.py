"""What service and reward process say to one another: msgpack structs, each behind its length, over a socket pair."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from services.rollout.rewards.score import Score
from shared.sample import Sample

LENGTH = struct.Struct("<I")
LIMIT_BYTES = 1 << 30


class Setup(msgspec.Struct, array_like=True):
    """Service -> process, once. `memory_bytes`: what calls may take beyond what the process holds once it is ready."""

    functions: list[tuple[str, dict[str, Any]]]
    timeout_s: float
    memory_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Process -> service, once: what the functions are, or the one-line `error` of one that cannot be had."""

    group: list[bool]
    is_async: list[bool]
    error: str = ""


class Work(msgspec.Struct, array_like=True):
    """Service -> process: calls of one function, each with the samples of a group or with one sample."""

    function: int
    calls: list[list[Sample]]


class Answer(msgspec.Struct, array_like=True):
    """Process -> service: the scores of call `number` of the Work. `last`: the process ends itself after it."""

    number: int
    scores: list[Score]
    last: bool = False


def frame(message: msgspec.Struct) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot carry, ValueError past LIMIT_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"{len(body)} bytes for one call of a reward, at most {LIMIT_BYTES}")
    return LENGTH.pack(len(body)) + body
