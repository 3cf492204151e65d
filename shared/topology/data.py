"""The sections about data: the training set, the evaluation sets, and how messages become prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.data import FORMS
from shared.topology.fields import Count, DataSource, Section

# Part of a task id ("<split>/<epoch>/<index>") and of metric names.
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
"""Names that a call of a chat template sets itself."""


def own_variables(args: dict[str, Any]) -> dict[str, Any]:
    """Return variables of a chat template. Raises ValueError for one that every call sets."""
    if taken := sorted(args.keys() & TEMPLATE_VARIABLES):
        raise ValueError(f"{', '.join(taken)}: set by every call; name other variables of the template")
    return args


class ChatTemplate(Section):
    add_generation_prompt: bool = Field(
        default=True, description="end a templated prompt with the opening of the assistant's turn"
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="variables of the template, such as `enable_thinking: false`"
    )

    @field_validator("args")
    @classmethod
    def _own_variables(cls, args: dict[str, Any]) -> dict[str, Any]:
        return own_variables(args)


_MESSAGE_BYTES = 64
"""Maximum bytes of the text that a chat template writes around a system message."""
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepWeight = Annotated[tuple[Annotated[int, Field(ge=0)], Weight], Field(strict=False)]


class TrainSource(Section):
    source: DataSource = Field(description=FORMS)
    weight: Annotated[tuple[StepWeight, ...], Field(strict=False)] | Weight = Field(
        default=1.0,
        description="share of the tasks, relative to the weights of the other sources; or [[step, weight], ...], each "
        "from that step on",
    )
    system: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="system message before the messages of a prompt that has none of its own"
    )
    chat_template: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, beside those of policy.chat_template.args"
    )
    max_prompt_tokens: Count | None = Field(
        default=None, description="maximum tokens in a prompt; default: data.train.max_prompt_tokens"
    )

    @field_validator("chat_template")
    @classmethod
    def _own_variables(cls, args: dict[str, Any]) -> dict[str, Any]:
        return own_variables(args)

    @property
    def weights(self) -> tuple[StepWeight, ...]:
        """The weights, each with the first step that has it."""
        return self.weight if isinstance(self.weight, tuple) else ((1, self.weight),)

    @property
    def system_bytes(self) -> int:
        """Maximum bytes that the system message adds to a prompt."""
        return len(self.system.encode()) + _MESSAGE_BYTES if self.system is not None else 0

    @field_validator("weight")
    @classmethod
    def _of_steps(cls, weight: tuple[StepWeight, ...] | float) -> tuple[StepWeight, ...] | float:
        if isinstance(weight, tuple):
            steps = [step for step, _ in weight]
            if not steps or steps[0] > 1 or sorted(set(steps)) != steps:
                raise ValueError(f"the steps {steps} must rise, and the first must be 1; name each step once")
        elif weight == 0:
            raise ValueError("0: the source would never be used; leave it out, or give weights by step")
        return weight


class TrainSet(Section):
    source: DataSource | None = Field(default=None, description=FORMS)
    sources: dict[SetName, TrainSource] = Field(
        default_factory=dict, description="several weighted sources by name, instead of source"
    )
    max_prompt_tokens: Count | None = Field(
        default=None, description="maximum tokens in a prompt; default: the longest prompt in the data set"
    )
    truncate: Literal["drop", "left", "right"] = Field(
        default="drop",
        description="what happens to a prompt that is too long: it is dropped, or loses tokens at its beginning or end",
    )
    shuffle: bool = Field(default=True, description="use a new order in every epoch")

    @model_validator(mode="after")
    def _one_form(self) -> TrainSet:
        if (self.source is None) == (not self.sources):
            raise ValueError("needs either source or sources (one or more), but not both")
        weights = [one.weights for one in self.sources.values()]
        for step in sorted({step for own in weights for step, _ in own}):
            if not any(weight for own in weights for weight in [weight for first, weight in own if first <= step][-1:]):
                raise ValueError(f"sources: no source has a weight above 0 at step {step}; give one to a source")
        return self

    @property
    def named(self) -> dict[str, TrainSource]:
        """The sources by name, in the order in which their rows are numbered. A source alone has an empty name."""
        return self.sources if self.source is None else {"": TrainSource.model_construct(source=self.source)}

    @staticmethod
    def key(name: str) -> str:
        """Return the topology key of a source of `named`."""
        return f"data.train.sources.{name}.source" if name else "data.train.source"


class EvalSet(Section):
    source: DataSource = Field(description=FORMS)
    every: Count = Field(
        default=20, description="steps between evaluations, 1 or more; one always precedes the first step"
    )
    samples: Count = Field(default=1, description="samples per row, 1 or more; must be 1 at temperature 0")
    temperature: float = Field(default=0.0, ge=0, description="sampling temperature, 0 (greedy) or more")
    max_new_tokens: Count | None = Field(
        default=None, description="maximum tokens in a completion; default: sampling.max_new_tokens"
    )
    rows: Count | None = Field(
        default=None, description="number of rows to evaluate, starting from the first; default: all"
    )


class Data(Section):
    train: TrainSet = Field(description="training set")
    eval: dict[SetName, EvalSet] = Field(default_factory=dict, description="evaluation sets by name")

    @property
    def train_sources(self) -> dict[str, TrainSource]:
        """The sources of the training set, by the key that names each."""
        return {self.train.key(name): one for name, one in self.train.named.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Every data source, by the key that names it."""
        return {key: one.source for key, one in self.train_sources.items()} | {
            f"data.eval.{name}.source": section.source for name, section in self.eval.items()
        }
