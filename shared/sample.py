"""`Sample`: what a reward function is given. It must stay plain data that users can build in their own tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One finished sample of a task.

    `row` is the dataset's, `messages` the prompt's messages followed by the assistant's answer (a raw-text prompt
    counts as one user message), `completion` the text after the prompt without special tokens, `token_ids` what was
    sampled, the EOS included. `finish_reason` is `stop` or `length`; `turns` counts the assistant's turns; `state`
    is the workflow's own.
    """

    task_id: str
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    completion: str
    token_ids: list[int]
    finish_reason: str
    turns: int = 1
    state: dict[str, Any] = field(default_factory=dict)
