"""`Sample`: the argument passed to a reward function. It is plain data that users can build in their own tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One finished sample of a task.

    `row` is the task's row in the data set. `messages` are the prompt's messages followed by the assistant's answer (a
    raw-text prompt counts as one user message). `completion` is the text after the prompt, without special tokens, and
    `token_ids` are the sampled tokens, including the EOS. `finish_reason` is `stop` or `length`, `turns` counts the
    assistant's turns, and `state` belongs to the workflow. `source` is the name of the row's source in
    `data.train.sources`, empty for a training set with a single source and for evaluations.
    """

    task_id: str
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    completion: str
    token_ids: list[int]
    finish_reason: str
    turns: int = 1
    state: dict[str, Any] = field(default_factory=dict)
    source: str = ""


def messages_of(row: dict[str, Any], completion: str) -> list[dict[str, Any]]:
    """Return the conversation, which ends with the assistant's answer. A raw-text prompt counts as one user message."""
    prompt = row["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*before, {"role": "assistant", "content": completion}]
