"""The arguments and the result of a workflow, as plain data and protocols that users can implement in their own tests.

    async def workflow(row: dict, llm: LLM, ctx: Context, **params) -> Trajectory     # produces one sample

`llm.chat` calls the policy. Its tokens are kept as they were sampled. A history that begins with the history of an
earlier call (including the policy's answer) continues that call's sequence; any other history starts a new one.

Workflows run in separate processes, with many samples in one event loop. Samples share only module state. If a process
fails, its samples are produced again from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Message = dict[str, Any]
T = TypeVar("T")


class WorkflowError(Exception):
    """A workflow made an invalid call or returned an invalid trajectory. The message is one line."""


class ContextFull(WorkflowError):
    """The next call does not fit into the model's context or the sample's `workflow.max_tokens`."""


@dataclass(frozen=True)
class ToolCall:
    """One tool call in the policy's answer: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer of the policy.

    `token_ids`, `logprobs` and `versions` describe the sampled tokens, including the EOS. `text` contains no special
    tokens and ends before any stop text. `finish_reason` is `stop` or `length`. `prompt_tokens` counts the input
    tokens. Append `message` to the history so that the next call continues this one.
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
    """One token sequence: four lists of equal length. `loss_mask` is 1 where the policy sampled the token. Elsewhere
    `logprobs` is 0 and `versions` is -1.

    `rewards` is empty, or a fifth such list with the reward of each token. `turns` lists (number of the call of the
    model, position of its last sampled token) for every call that has extended the sequence.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Trajectory:
    """One sample. If `reward` is None, the topology's reward functions score it. The rewards of its sequences are added
    to that of the sample. `metrics` holds numbers for telemetry."""

    sequences: list[Sequence]
    reward: float | dict[str, float | str] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def place_rewards(sequences: list[Sequence], turn_rewards: list[float]) -> None:
    """Set the `rewards` of `sequences`: each turn's at its last sampled token. Raises WorkflowError if there is not
    one number per turn."""
    turns = sum(len(sequence.turns) for sequence in sequences)
    if len(turn_rewards) != turns:
        raise WorkflowError(f"{len(turn_rewards)} turn rewards for {turns} turns; give one number for each answer")
    for sequence in sequences:
        sequence.rewards = [0.0] * len(sequence.token_ids)
        for turn, at in sequence.turns:
            sequence.rewards[at] += float(turn_rewards[turn])


class LLM(Protocol):
    """The policy, as called by one sample."""

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Turn:
        """Return the policy's answer to a history. Raises ContextFull if the history does not fit, and WorkflowError if
        it is invalid."""

    async def complete(self, prompt: str) -> Turn:
        """Return the policy's continuation of raw text, always as a new sequence."""

    def trajectory(
        self,
        reward: float | dict[str, float | str] | None = None,
        metrics: dict[str, float] | None = None,
        turn_rewards: list[float] | None = None,
    ) -> Trajectory:
        """Return a trajectory of everything generated for this sample so far.

        `turn_rewards` has one number for each answer of the policy, in the order of the answers. Their sum is added to
        `reward`. Raises WorkflowError for another number of them.
        """


class Context(Protocol):
    """The context of one sample. `base_url` serves the OpenAI chat completions API for this sample (with any
    `api_key`), and `openai` is a client of it."""

    task_id: str
    sample: int
    state: dict[str, Any]
    """The workflow's own values, which reward functions receive as `sample.state`. They must be JSON values."""

    @property
    def base_url(self) -> str: ...

    @property
    def openai(self) -> Any:
        """An `openai.AsyncOpenAI` for this sample. All samples share its connections. It needs the package openai
        (`make setup-agents`)."""

    @property
    def remaining_s(self) -> float:
        """Seconds left for this sample (`workflow.timeout_s`)."""

    async def call(self, tool: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """Call `tool(*args)` on its own thread, and return its result.

        Raises TimeoutError after `timeout_s`, or when the sample's time is up. The thread is then abandoned.
        """
