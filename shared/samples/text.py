"""The tasks whose samples are recorded, and the shard that carries their readable text from rollout to recorder.

Every process computes the choice of the tasks on its own, without negotiation. The shard is msgpack as uint8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from proto.tensors import Array
from shared.stages import TRAIN, text_limit_bytes

if TYPE_CHECKING:
    from shared.topology import Topology


class Choice(msgspec.Struct, frozen=True):
    """Chooses all evaluation tasks and a fraction of the training tasks. Whether a task is chosen depends only on its
    id.

    Of the `tasks_per_step` tasks of a step, about `per_step` are thus chosen.
    """

    every: int
    per_step: int
    tasks_per_step: int

    @classmethod
    def of(cls, topology: Topology) -> Choice | None:
        """Return the choice for a topology, or None if no samples are recorded."""
        samples = topology.monitor.samples
        if samples is None:
            return None
        return cls(samples.every, samples.per_step, topology.algorithm.tasks_per_step)

    def takes(self, task_id: str) -> bool:
        """Return whether the samples of a task can be recorded.

        If so, the rollout also puts their text into the store.
        """
        if not task_id.startswith(f"{TRAIN}/"):
            return True
        return xxhash.xxh3_64_intdigest(task_id.encode()) % self.tasks_per_step < self.per_step

    def takes_step(self, step: int) -> bool:
        """Return whether the samples of a training step are recorded."""
        return step % self.every == 0


class SampleText(msgspec.Struct, array_like=True):
    """The text and the scores of one sample."""

    completion: str
    finish_reason: str
    reward: float | None
    """None if the sample failed."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: int = 1
    tool_calls: int = 0
    messages: list[dict[str, Any]] = []
    pieces: list[str] = []
    """The text of each token, starting with the first sampled token of each sequence. Empty if it was left out."""
    info: dict[str, str] = {}
    failure: str = ""
    """For a sample that failed: the reason in one line."""
    length: int = 0
    """For a sample that failed: number of sampled tokens, which no shard contains."""


class TaskText(msgspec.Struct, array_like=True):
    """The text of a task. `samples` holds the samples that did not fail, in the order of `sample_index`."""

    prompt: str | list[dict[str, Any]]
    samples: list[SampleText]
    answer: Any = None
    cut: int = 0
    """Number of characters left out to keep the shard within its limit."""
    failed: list[SampleText] = []
    """Samples without a reward."""


_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_decode = msgspec.msgpack.Decoder(TaskText).decode


def pack(text: TaskText, tokens: int) -> Array:
    """Return the shard, uint8 [N]. If the shard exceeds its limit, leave out the pieces, then the messages, and finally
    cut the text. A task that was not sampled gets the space of one sample."""
    limit = text_limit_bytes(tokens, max(len(_all(text)), 1))
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


def _all(text: TaskText) -> list[SampleText]:
    return [*text.samples, *text.failed]


def _encode(text: TaskText) -> bytes:
    """Return the text as msgpack. Row values that msgpack cannot represent become text."""
    try:
        return _encoder.encode(text)
    except (UnicodeEncodeError, OverflowError):
        text.prompt, text.answer = _clean(text.prompt), _clean(text.answer)
        for sample in _all(text):
            sample.completion, sample.pieces = _clean(sample.completion), _clean(sample.pieces)
            sample.messages, sample.metrics = _clean(sample.messages), _clean(sample.metrics)
            sample.rewards, sample.info = _clean(sample.rewards), _clean(sample.info)
            sample.failure = _clean(sample.failure)
        return _encoder.encode(text)


def _clean(value: Any) -> Any:
    """Return JSON data without lone surrogates or integers of more than 64 bits."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_clean(key): _clean(item) for key, item in value.items()}
        case list() | tuple():
            return [_clean(item) for item in value]
        case int() if not -(1 << 63) <= value < 1 << 64:
            return str(value)
        case _:
            return value


def _drop_pieces(text: TaskText) -> None:
    for sample in _all(text):
        sample.pieces = []


def _drop_messages(text: TaskText) -> None:
    for sample in _all(text):
        text.cut += sum(len(str(message.get("content", ""))) for message in sample.messages)
        sample.messages = []


def _cut_text(text: TaskText, limit: int) -> None:
    """Cut every text to an equal share of the limit. A character takes at most four bytes."""
    share = limit // (8 * (len(_all(text)) + 2))

    def short(value: str, most: int = share) -> str:
        text.cut += max(len(value) - most, 0)
        return value[:most]

    text.prompt = short(text.prompt if isinstance(text.prompt, str) else msgspec.json.encode(text.prompt).decode())
    text.answer = None if text.answer is None else short(str(text.answer))
    for sample in _all(text):
        sample.failure = short(sample.failure, share // 2)
        sample.completion = short(sample.completion, share - len(sample.failure))
        sample.rewards, sample.metrics, sample.info = {}, {}, {}
