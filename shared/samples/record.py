"""The record of one sample in a run directory's `samples/`, and the files that hold the records.

    samples/train/<step>.jsonl                              samples of a training step
    samples/eval/<set>/<version>.jsonl                      samples of an evaluation of a policy version
    samples/discarded/<lineage>/<split>/<number>.jsonl      samples of steps that were rolled back

Each line is a JSON object with the fields of `SampleRecord`. Only the service `recorder` writes these files.

A model can write anything, so `plain` makes its text readable to people and harmless to a terminal.
"""

from __future__ import annotations

import math
import unicodedata
from enum import StrEnum
from typing import Any

import msgspec

from shared.stages import TRAIN

FOLDER = "samples"
EVAL_PREFIX = "eval/"
DISCARDED = "discarded"
SUFFIX = ".jsonl"
SHOWN_CHARACTERS = 4000
_KEPT = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of control characters, invisible format characters (such as bidirectional overrides), lone
surrogates, private-use characters, and separators that break lines."""


class SampleState(StrEnum):
    """The outcome of a sample's task."""

    TRAINED = "trained"
    FILTERED = "filtered"  # its group had equal rewards (`algorithm.filter_zero_variance`)
    DROPPED = "dropped"  # too stale, or a bad row; `reason` says why
    SCORED = "scored"  # it belongs to an evaluation


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sample. The token lists have equal lengths, and omit the tokens before a sequence's first sampled token.

    A failed sample has no reward and no tokens. A task that was not sampled has one record, with `sample` -1.
    """

    task: str  # task id: `<split>/<epoch>/<index>`
    sample: int = 0  # number of the sample in its group: first those that did not fail, then those that failed
    samples: int = 1  # number of records of the task
    split: str = TRAIN  # "train", or "eval/<set>"
    step: int | None = None
    """The step that trained the sample. For a filtered or dropped sample, the step that was formed next. For a scored
    sample, the policy version."""
    lineage: int = 0  # lineage of the weights that the step belongs to
    state: SampleState = SampleState.TRAINED
    reason: str = ""  # the reason why it was filtered or dropped
    prompt: str | list[dict[str, Any]] = ""  # raw text or messages, as in the row
    completion: str = ""  # the text that reward functions received
    messages: list[dict[str, Any]] = []  # for a workflow: the whole conversation, prompt included
    answer: Any = None  # `answer` of the row
    pieces: list[str] = []  # text of each token, special tokens included
    token_ids: list[int] = []
    logprobs: list[float] = []  # by the engine at the sampling temperature, 0 where not sampled
    train_logprobs: list[float] | None = None  # by the trainer before the step's first update; None: not computed
    advantages: list[float] | None = None  # of each token, 0 where not trained; None: all have `advantage`
    sampled: list[int] | None = None  # 1 where the policy sampled the token; None: it sampled all of them
    reward: float | None = 0.0  # None: the sample failed
    failure: str = ""  # the reason why the sample failed
    rewards: dict[str, float] = {}  # by name of the reward function or of a number in its dict
    info: dict[str, str] = {}  # texts that a reward function returned in a dict, such as the answer that it found
    group_mean: float | None = None  # mean of the rewards of the task's samples that did not fail
    group_best: float | None = None  # highest of these rewards
    metrics: dict[str, float] = {}  # numbers that the workflow reported
    advantage: float | None = None  # None unless trained
    length: int = 0  # number of sampled tokens
    finish_reason: str = ""  # "stop" or "length"
    versions: list[int] = []  # policy versions that sampled it, ascending
    turns: int = 1
    tool_calls: int = 0
    cut: int = 0  # number of characters of text that were left out because they exceeded the limits
    at: float = 0.0  # time at which the record was written, in Unix seconds


def rank(record: SampleRecord) -> float:
    """Return the reward for ordering records. Failed samples come below all others."""
    return -math.inf if record.reward is None else record.reward


def group_scores(record: SampleRecord) -> dict[str, float]:
    """Return the mean and the highest reward of the sample's group by name, or {} if the group has one sample.

    For an evaluated row, these equal avg@k and pass@k, except that avg@k and pass@k count failed samples as 0.
    """
    if record.group_mean is None or record.group_best is None or record.samples < 2:
        return {}
    return {"group mean": record.group_mean, "group best": record.group_best}


def file_of(split: str, step: int) -> str:
    """Return the path, relative to `samples/`, of the file that holds the samples of a step."""
    return f"{split}/{step}{SUFFIX}"


def split_of(task_id: str) -> str:
    """Return the split under which a task's samples are recorded: "train" or "eval/<set>"."""
    name = task_id.rsplit("/", 2)[0]
    return name if name == TRAIN else f"{EVAL_PREFIX}{name}"


def plain(text: str) -> str:
    """Return the text with every control and invisible character written as its escape, such as `\\x1b` and `\\u202e`.

    Newlines and tabs are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _escaped(character) for character in text)


def conversation(prompt: str | list[dict[str, Any]]) -> str:
    """Return a raw prompt unchanged, or the messages of a conversation in order, each preceded by its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Return a text, or its beginning followed by the number of characters left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _is_harmless(character: str) -> bool:
    return character in _KEPT or unicodedata.category(character) not in _HIDDEN


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
