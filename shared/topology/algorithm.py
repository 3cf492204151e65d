"""The sections `algorithm` and `optimizer`: what a training step computes, never where it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.topology.fields import Count, Pair, Section

AdvantageName = Literal["grpo", "rloo", "reinforce", "reinforce_plus_plus"]
LossName = Literal["ppo_clip", "gspo", "cispo"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
Anchor = Literal["proximal", "rollout"]
# They subtract a statistic of the group, which a group of one does not have.
GROUP_ADVANTAGES = ("grpo", "rloo")


class Advantage(Section):
    name: AdvantageName = Field(
        default="grpo", description="estimator; grpo and rloo compare the samples of a group"
    )
    scale: Literal["std", "none"] = Field(
        default="std", description="divide by the group's standard deviation, or not"
    )


class Loss(Section):
    name: LossName = Field(default="ppo_clip", description="policy loss")
    clip: Pair = Field(
        default=(0.2, 0.2), description="[low, high]: the ratio is clipped to [1 - low, 1 + high]"
    )
    aggregation: Aggregation = Field(
        default="token_mean", description="weights of the tokens of an optimizer batch"
    )
    anchor: Anchor = Field(
        default="proximal",
        description="log-probs the ratio is taken against: proximal (the trainer's own at the step's start) "
        "or rollout (the engine's); default proximal unless staleness is 0 and a step has one update",
    )
    tis_cap: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="cap C of the truncated importance weight exp(prox - rollout), above 0; "
        "default 2.0 with anchor proximal, null with anchor rollout, which has no such weight",
    )


class KL(Section):
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="estimator of KL(policy, reference) a token"
    )
    place: Literal["loss", "reward"] = Field(
        default="loss", alias="in", description="where the KL term is added"
    )
    coef: float = Field(ge=0, description="factor of the KL term, 0 or more; 0 starts no reference")


class FilterZeroVariance(Section):
    max_refill: int = Field(
        default=3, ge=0, description="how many times a filtered task is replaced within a step"
    )


class Algorithm(Section):
    tasks_per_step: Count = Field(description="tasks (prompts) a training step consumes, 1 or more")
    group_size: Count = Field(description="samples of each task, 1 or more; 2 or more for grpo and rloo")
    mini_batch_tasks: Count = Field(
        default=1, description="tasks an update consumes; default tasks_per_step, must divide it"
    )
    num_iterations: Count = Field(
        default=1, description="passes over a step's tasks; the step still makes one version"
    )
    advantage: Advantage = Field(default_factory=Advantage, description="advantage estimator")
    loss: Loss = Field(default_factory=Loss, description="policy loss")
    kl: KL | None = Field(default=None, description="KL to the reference; left out: none")
    filter_zero_variance: FilterZeroVariance | None = Field(
        default=None, description="drop tasks whose rewards are all equal; left out: keep them"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="factor of the entropy bonus, 0 or more")
    overlong: Literal["keep", "mask"] = Field(
        default="keep", description="samples cut at max_new_tokens: train on them or not"
    )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one training step."""
        return self.num_iterations * (self.tasks_per_step // self.mini_batch_tasks)


class Optimizer(Section):
    name: Literal["adamw"] = Field(default="adamw", description="optimizer")
    lr: float = Field(gt=0, description="learning rate after warm-up, above 0")
    betas: Pair = Field(default=(0.9, 0.999), description="[beta1, beta2], each from 0 to below 1")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator, above 0")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, 0 or more")
    clip_norm: float = Field(default=1.0, gt=0, description="gradient norm is clipped to this, above 0")
    warmup_steps: int = Field(default=0, ge=0, description="training steps of linear warm-up, 0 or more")
