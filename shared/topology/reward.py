"""The section `reward`, which defines how samples are scored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from shared.topology.fields import Count, Dtype, Function, ModelFolder, Seconds, Section, Size
from shared.topology.passes import Passes

REWARD_MODEL_FUNCTION = "builtin:reward_model"
"""The reward function that stands for the score of the model in the section `reward_model`."""
MOST_TEXT_TOKENS = 4096
"""Default of `reward_model.max_tokens`."""


class RewardModel(Section):
    model: ModelFolder = Field(
        description="folder or hub name of a sequence classifier with one label, such as the export of a run with "
        "policy.head value; it reads a sample's text with its own tokenizer and chat template"
    )
    dtype: Dtype | None = Field(default=None, description="data type of the weights; default: policy.dtype")
    passes: Passes | None = Field(
        default=None, description="forward passes that compute scores; default: the fastest that are proved"
    )
    max_tokens: Count | None = Field(
        default=None,
        description="maximum tokens of a text, prompt and template included; a sample with a longer one fails; "
        f"default: {MOST_TEXT_TOKENS}, or the model's positions if they are fewer",
    )


class RewardTerm(Section):
    function: Function = Field(description="builtin:<name> or <module>:<function>")
    weight: float = Field(default=1.0, description="factor for this function in the sum")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the function")


class RewardRetry(Section):
    limit_s: float = Field(
        default=600.0,
        ge=0,
        description="seconds that a judge (a server that a reward function asks) may be unavailable before the run "
        "ends; 0: do not wait; the samples are lost at once",
    )
    backoff_s: Seconds = Field(default=1.0, description="seconds before the first retry of a judge; must be above 0")
    max_backoff_s: Seconds = Field(
        default=30.0,
        description="maximum seconds between two retries, up to which each pause doubles; must be backoff_s or more",
    )


class Reward(Section):
    function: Function | None = Field(default=None, description="builtin:<name> or <module>:<function>")
    functions: Annotated[tuple[RewardTerm, ...], Field(strict=False)] = Field(
        default=(), description="weighted sum of several functions, instead of function"
    )
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of function")
    model: ModelFolder | None = Field(default=None, description="short for reward_model.model")
    timeout_s: Seconds = Field(
        default=10.0, description="maximum seconds for one call; must be above 0, and may exceed lease.lease_s"
    )
    memory: Size = Field(
        default=1024**3,
        description="bytes a reward process may use in addition to its libraries, such as 1GiB; a call that needs "
        "more fails; each process that it starts has a separate limit of the same size; shared mappings and /dev/shm "
        "are not counted",
    )
    processes: Count = Field(
        default=2, description="processes in each rollout instance that call reward functions, 1 or more"
    )
    retry: RewardRetry = Field(
        default_factory=RewardRetry, description="how rewards wait for a judge that does not answer"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Reward:
        if (self.function is None) == (not self.functions):
            raise ValueError("needs either function or functions (one or more), but not both")
        if self.functions and self.params:
            raise ValueError(
                "params belong to function and have no effect with functions; write them inside the items of functions"
            )
        return self

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The reward as a weighted sum, whichever of the two forms it was written in."""
        if self.function is None:
            return self.functions
        return (RewardTerm(function=self.function, params=self.params),)
