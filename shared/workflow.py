"""What a workflow is given and what it returns. It must stay plain data and protocols that users can build on in their
own tests.

    async def workflow(row: dict, llm: LLM, ctx: Context, **params) -> Trajectory     # makes one sample

`llm.chat` calls the policy; its tokens are kept as they were sampled. A history that begins with the one of an earlier
call (the policy's answer included) continues that call's sequence; any other history opens a new one.

Workflows run in processes of their own, many samples in one loop: nothing is shared between samples but what a module
holds, and a sample whose process broke is made again from its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Message = dict[str, Any]
T = TypeVar("T")


class WorkflowError(Exception):
    """A call that a workflow may not make, or a trajectory that it may not return. One line."""


class ContextFull(WorkflowError):
    """The next call does not fit the model's context or the sample's `workflow.max_tokens`."""


@dataclass(frozen=True)
class ToolCall:
    """One call in the policy's answer, as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` writes it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer of the policy.

    `token_ids`, `logprobs` and `versions` are of the sampled tokens, the EOS included; `text` is without special
    tokens and cut before a stop text; `finish_reason` is `stop` or `length`; `prompt_tokens` counts the input.
    `message` is what to append to the history, so that the next call continues this one.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    prompt_tokens: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.text}


@dataclass
class Sequence:
    """One token sequence: four lists of the same length. `loss_mask` is 1 where the policy sampled the token;
    elsewhere `logprobs` is 0 and `versions` -1."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Trajectory:
    """One sample. `reward` None: the topology's reward functions score it. `metrics`: numbers for telemetry."""

    sequences: list[Sequence]
    reward: float | dict[str, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class LLM(Protocol):
    """The policy, for one sample."""

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Turn:
        """The policy's answer to a history. Raises ContextFull, and WorkflowError for what no template takes."""

    async def complete(self, prompt: str) -> Turn:
        """The policy's continuation of raw text; always a sequence of its own."""

    def trajectory(
        self, reward: float | dict[str, float] | None = None, metrics: dict[str, float] | None = None
    ) -> Trajectory:
        """Everything that was sampled for this sample so far."""


class Context(Protocol):
    """What else a workflow has. `base_url` speaks OpenAI's chat completions for this sample alone (any `api_key`)."""

    task_id: str
    sample: int
    state: dict[str, Any]
    """The workflow's own; reward functions get it as `sample.state`. What JSON has, nothing else."""

    @property
    def base_url(self) -> str: ...

    @property
    def remaining_s(self) -> float:
        """Seconds that this sample has left (`workflow.timeout_s`)."""

    async def call(self, tool: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """`tool(*args)` on a thread of its own. Raises TimeoutError after `timeout_s`, or when the sample's time is
        over; a tool that never answers is left behind."""
