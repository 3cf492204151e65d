"""The shard that carries the readable text of a task's samples from rollout to recorder: msgpack as uint8."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from proto.tensors import Array
from shared.samples.limits import text_limit_bytes


class SampleText(msgspec.Struct, array_like=True):
    """The text and the scores of one sample."""

    completion: str
    finish_reason: str
    reward: float
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: int = 1
    tool_calls: int = 0
    messages: list[dict[str, Any]] = []
    pieces: list[str] = []
    """The text of each token, starting with the first sampled token of each sequence. Empty if it was left out."""


class TaskText(msgspec.Struct, array_like=True):
    """Those samples of a task that did not fail, in the order of `sample_index`."""

    prompt: str | list[dict[str, Any]]
    samples: list[SampleText]
    answer: Any = None
    cut: int = 0
    """Number of characters left out to keep the shard within its limit."""


_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_decode = msgspec.msgpack.Decoder(TaskText).decode


def pack(text: TaskText, tokens: int) -> Array:
    """Return the shard, uint8 [N]. If the shard exceeds its limit, leave out the pieces, then the messages, and finally
    cut the text."""
    limit = text_limit_bytes(tokens, len(text.samples))
    packed = _encode(text)
    for shorten in (_drop_pieces, _drop_messages):
        if len(packed) > limit:
            shorten(text)
            packed = _encode(text)
    if len(packed) > limit:
        _cut_text(text, limit)
        packed = _encode(text)
    return np.frombuffer(packed, np.uint8)


def unpack(shard: Array) -> TaskText:
    """Return the content of a shard. Raises msgspec.DecodeError for other bytes."""
    return _decode(shard.tobytes())


def _encode(text: TaskText) -> bytes:
    """Return the text as msgpack. Row values that msgpack cannot represent become text."""
    try:
        return _encoder.encode(text)
    except (UnicodeEncodeError, OverflowError):
        text.prompt, text.answer = _clean(text.prompt), _clean(text.answer)
        for sample in text.samples:
            sample.completion, sample.pieces = _clean(sample.completion), _clean(sample.pieces)
            sample.messages, sample.metrics = _clean(sample.messages), _clean(sample.metrics)
            sample.rewards = _clean(sample.rewards)
        return _encoder.encode(text)


def _clean(value: Any) -> Any:
    """Return JSON data without lone surrogates or integers of more than 64 bits."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_clean(key): _clean(each) for key, each in value.items()}
        case list() | tuple():
            return [_clean(each) for each in value]
        case int() if not -(1 << 63) <= value < 1 << 64:
            return str(value)
        case _:
            return value


def _drop_pieces(text: TaskText) -> None:
    for sample in text.samples:
        sample.pieces = []


def _drop_messages(text: TaskText) -> None:
    for sample in text.samples:
        text.cut += sum(len(str(message.get("content", ""))) for message in sample.messages)
        sample.messages = []


def _cut_text(text: TaskText, limit: int) -> None:
    """Cut every text to an equal share of the limit. A character takes at most four bytes."""
    share = limit // (8 * (len(text.samples) + 2))

    def short(value: str) -> str:
        text.cut += max(len(value) - share, 0)
        return value[:share]

    text.prompt = short(text.prompt if isinstance(text.prompt, str) else msgspec.json.encode(text.prompt).decode())
    text.answer = None if text.answer is None else short(str(text.answer))
    for sample in text.samples:
        sample.completion = short(sample.completion)
        sample.rewards, sample.metrics = {}, {}
