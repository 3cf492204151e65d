"""The sections `algorithm`, `optimizer`, `critic` and `teacher`, which define what a training step computes but not
where it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from shared.data.source import ANSWER, PAIR
from shared.topology.fields import Count, Dtype, ModelFolder, Pair, Section, not_one_of
from shared.topology.passes import Passes

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "reinforce", "gae", "none")
# These give each token an advantage of its own.
TOKEN_ADVANTAGES = ("reinforce", "gae")
NO_REWARD = "builtin:none"
"""The reward function of a run that learns from a teacher or the rows' answers alone and leaves out `reward`: every
reward is 0."""
MAX_CREDIT_TASKS = 8192
"""Maximum number of tasks of a step with an advantage per token. A statistic of so many tasks fills a message's 64 KiB
for one array."""
PREFERENCES = ("dpo", "ipo", "simpo", "bradley_terry")
"""The losses of pairs: each compares a chosen with a rejected answer of a row."""
REFERENCED = ("dpo", "ipo")
"""Those that compare the policy's log-probs with the reference's."""
FROM_ROWS = ("cross_entropy", *PREFERENCES)
"""The losses that learn from the rows' answers. Nothing is sampled for them."""
LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "importance_sampling", *FROM_ROWS)
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
Anchor = Literal["proximal", "rollout"]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
# These subtract a statistic of the group, which is undefined for a group of one sample.
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo")
# The scale and offset of rewards have no effect on these.
INVARIANT_ADVANTAGES = ("reinforce_pp", "reinforce_pp_baseline")
# Default `clip` of each loss: [low, high].
CLIPS: dict[str, tuple[float, float]] = {"ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
SAPO_TEMPERATURES = (1.0, 1.05)
BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0}
"""Default `beta` of each loss. Sources: DPO (arXiv 2305.18290) and TRL for the first two; SimPO's own code."""
SIMPO_MARGIN = 0.5
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function(name: str) -> bool:
    """Return whether a name is the import path of a user's function (`my.module:fn`) rather than a builtin's name."""
    return ":" in name


def _builtin_or_function(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names and not _FUNCTION.fullmatch(value):
            raise ValueError(f"{not_one_of(value, names)}; a function of your own is written my.module:fn")
        return value

    return check


class Advantage(Section):
    name: Annotated[str, AfterValidator(_builtin_or_function(ADVANTAGES))] = Field(
        default="grpo",
        description="estimator, or your own function as my.module:fn; grpo, dr_grpo, rloo, opo and "
        "reinforce_pp_baseline compare the samples in a group; none: all are 0, "
        "for runs that learn from a teacher alone",
    )
    scale: Literal["std", "none"] | None = Field(
        default=None, description="grpo: divide by the group's standard deviation (std, the default), or not (none)"
    )
    std_epsilon: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="grpo with scale std: constant added to the deviation; must be above 0; default 1e-6 (TRL uses "
        "1e-4)",
    )
    per: Literal["sample", "token"] | None = Field(
        default=None,
        description="my.module:fn: what it computes an advantage for, each sample (sample, the default) or each token "
        "(token)",
    )
    gamma: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="reinforce and gae: discount of later rewards per trained token, above 0 and at most 1; default "
        "1.0",
    )
    lam: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="gae: weight of later temporal differences, from 0 (values alone) to 1 (rewards alone); default "
        "1.0",
    )
    lam_value: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="gae: the same for the returns that the critic learns; default lam"
    )
    truncated: Literal["end", "bootstrap"] | None = Field(
        default=None,
        description="gae: what follows the last token of a sample that was cut at max_new_tokens: nothing (end, the "
        "default), or what the critic expects there (bootstrap)",
    )
    whiten: Literal["step", "mini_batch", "none"] | None = Field(
        default=None,
        description="advantages per token: subtract their mean and divide by their deviation, over the tokens of the "
        "step (step, the default) or of the mini-batch (mini_batch), or not (none)",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for a function of your own")

    @property
    def per_token(self) -> bool:
        """Whether each token has an advantage of its own."""
        return self.name in TOKEN_ADVANTAGES or self.per == "token"

    @property
    def may_use_values(self) -> bool:
        """Whether the estimator can use the values of a critic."""
        return self.name == "gae" or self.per == "token"


class RatioMask(Section):
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="value that must lie within [low, high]: exp(prox - rollout) of the token, its product over the "
        "sequence, or its geometric mean over the sequence",
    )
    low: float = Field(
        default=0.5, ge=0, lt=1, description="smallest ratio that is trained on; must be at least 0 and below 1"
    )
    high: float = Field(default=5.0, gt=1, description="largest ratio that is trained on; must be above 1")


class Loss(Section):
    name: Annotated[str, AfterValidator(_builtin_or_function(LOSSES))] = Field(
        default="ppo_clip",
        description="policy loss, or your own function as my.module:fn; cross_entropy learns the rows' answers; dpo, "
        "ipo, simpo and bradley_terry learn from rows with a chosen and a rejected answer",
    )
    beta: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="dpo, ipo and simpo: strength of the preference; must be above 0; default 0.1 for dpo and ipo, 2.0 "
        "for simpo",
    )
    margin: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="simpo: difference of the scores that is aimed at, 0 or more; default 0.5"
    )
    clip: Pair | None = Field(
        default=None,
        description="[low, high]: the ratio is clipped to [1 - low, 1 + high]; default [0.2, 0.2] for ppo_clip, "
        "[3e-4, 4e-4] for gspo, [1.0, 4.0] for cispo; none for other losses, or if anchor is proximal and a step "
        "has one update",
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="ppo_clip: bound on the ratio where the advantage is negative; must be above 1, such as 3.0",
    )
    clamp: Literal["upper", "both"] | None = Field(
        default=None, description="cispo: clamp the ratio from above only (upper, the default) or on both sides"
    )
    temperatures: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = Field(
        default=None,
        description="sapo: [positive, negative] gate temperatures by the advantage's sign; default [1.0, 1.05]",
    )
    aggregation: Aggregation = Field(default="token_mean", description="weights of the tokens in an optimizer batch")
    anchor: Anchor = Field(
        default="proximal",
        description="log-probs in the denominator of the ratio: proximal (the trainer's own at the step's start) "
        "or rollout (the engine's); default proximal unless staleness is 0 and a step has one update",
    )
    tis_cap: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="cap C of the truncated importance weight exp(prox - rollout); must be above 0; default 2.0 if "
        "anchor is proximal and there is no ratio_mask, otherwise the weight is not truncated; if anchor is rollout, "
        "there is no such weight",
    )
    ratio_mask: RatioMask | None = Field(
        default=None, description="mask tokens on which engine and trainer disagree too much; default: no mask"
    )
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for a function of your own")

    @property
    def from_rows(self) -> bool:
        """Whether the loss learns from the rows' answers, so that nothing is sampled for it."""
        return self.name in FROM_ROWS

    @property
    def answers(self) -> tuple[str, ...]:
        """The fields of a row with the answers that are trained on, or () if answers are sampled."""
        return PAIR if self.compares else (ANSWER,) if self.from_rows else ()

    @property
    def compares(self) -> bool:
        """Whether the loss compares the two answers of a row."""
        return self.name in PREFERENCES


class KL(Section):
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of KL(policy, reference) per token")
    place: Literal["loss", "reward"] = Field(default="loss", alias="in", description="where the KL term is added")
    coef: float = Field(ge=0, description="factor for the KL term, 0 or more; with 0, no reference is started")
    refresh_every: Count | None = Field(
        default=None,
        description="steps between refreshes of the reference from the policy; must be a multiple of checkpoint.every; "
        "default: the reference stays the model with which the run began",
    )


class Distill(Section):
    kl: Literal["reverse", "forward"] = Field(
        default="reverse",
        description="reverse: the advantage of each token is lowered by coef times the policy's log-prob minus the "
        "teacher's; forward: the loss has the term coef times KL(teacher || policy) over the teacher's likeliest "
        "tokens",
    )
    coef: float = Field(default=1.0, gt=0, description="factor for the difference, or the term; must be above 0")
    top_k: Count | None = Field(
        default=None,
        description="forward: number of the teacher's likeliest tokens, 1 or more, the others counting as one; "
        "default: 64",
    )


class LoadBalance(Section):
    coef: float = Field(
        default=0.0,
        ge=0,
        description="factor, 0 or more: each layer adds coef times the number of experts times the sum over the "
        "experts of their share of the choices and their mean probability, over the whole optimizer batch; "
        "router_aux_loss_coef and output_router_logits of the model's configuration have no effect",
    )


class FilterZeroVariance(Section):
    max_refill: int = Field(
        default=3,
        ge=1,
        description="maximum number of tasks that are replaced per step, as a multiple of tasks_per_step; must be 1 or "
        "more",
    )


class OverlongPenalty(Section):
    tokens: Count = Field(
        description="number of tokens before max_new_tokens over which the penalty grows linearly from 0; must be 1 or "
        "more"
    )
    factor: float = Field(
        default=1.0, gt=0, description="reward that a sample of maximum length loses; must be above 0"
    )


class Algorithm(Section):
    tasks_per_step: Count = Field(description="tasks (prompts) per training step, 1 or more")
    group_size: Count = Field(description="samples per task, 1 or more; 2 or more where samples are compared")
    mini_batch_tasks: Count = Field(
        default=1, description="tasks per update; default tasks_per_step, which it must divide"
    )
    num_iterations: Count = Field(
        default=1, description="passes over a step's tasks; the step still produces one version"
    )
    advantage: Advantage = Field(default_factory=Advantage, description="advantage estimator")
    loss: Loss = Field(default_factory=Loss, description="policy loss")
    kl: KL | None = Field(default=None, description="KL to the reference; default: none")
    distill: Distill | None = Field(default=None, description="learning from the teacher; default: none")
    filter_zero_variance: FilterZeroVariance | None = Field(
        default=None, description="drop tasks whose rewards, as returned by the functions, are all equal; default: keep"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="factor for the entropy bonus, 0 or more")
    overlong: Literal["keep", "mask"] = Field(
        default="keep", description="samples cut at max_new_tokens: train on them (keep) or not (mask)"
    )
    overlong_penalty: OverlongPenalty | None = Field(
        default=None, description="soft penalty for long samples; default: none"
    )
    normalise_rewards: Literal["none", "batch"] = Field(
        default="none", description="batch: first normalise the rewards in a step to mean 0 and deviation 1"
    )

    router_replay: Literal["none", "train", "rollout"] = Field(
        default="none",
        description="mixtures of experts: the experts that a token uses in the trainer are those of its own pass "
        "before the first update (train), or those with which the engine sampled (rollout)",
    )
    load_balance: LoadBalance = Field(
        default_factory=LoadBalance, description="mixtures of experts: loss that balances the load of the experts"
    )

    @property
    def route_key(self) -> str:
        """The key of the routes that the policy's passes replay, or an empty string."""
        return {"none": "", "train": "prox_routes", "rollout": "routes"}[self.router_replay]

    @property
    def distilled_tokens(self) -> int:
        """Number of the teacher's likeliest tokens that the loss reads, or 0 without forward KL."""
        return self.distill.top_k or 0 if self.distill is not None else 0

    @property
    def distills_in_rewards(self) -> bool:
        """Whether the difference to the teacher is part of the rewards of tokens, and not of the loss."""
        return self.distill is not None and self.distill.kl == "reverse" and self.advantage.per_token

    @property
    def reward_kl(self) -> KL | None:
        """The KL to the reference that is part of the reward, or None."""
        return self.kl if self.kl is not None and self.kl.place == "reward" and self.kl.coef > 0 else None

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per training step."""
        return self.num_iterations * -(-self.tasks_per_step // self.mini_batch_tasks)

    @property
    def ratio_is_one(self) -> bool:
        """Whether exp(cur - prox) is 1 at every update, because the only update starts from the weights of `prox`."""
        return self.loss.anchor == "proximal" and self.updates_per_step == 1


class Optimizer(Section):
    name: Literal["adamw"] = Field(default="adamw", description="optimizer")
    lr: float = Field(gt=0, description="learning rate after warm-up; must be above 0")
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="[beta1, beta2]; each must be at least 0 and below 1"
    )
    eps: float = Field(default=1e-8, gt=0, description="constant added to the denominator; must be above 0")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, 0 or more")
    clip_norm: float = Field(default=1.0, gt=0, description="norm to which the gradient is clipped; must be above 0")
    warmup_steps: int = Field(default=0, ge=0, description="training steps of linear warm-up, 0 or more")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate falls after warm-up"
    )
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at which a linear or cosine schedule ends")
    decay_steps: Count | None = Field(
        default=None,
        description="training step, counted from the model's first update, from which the rate is min_lr; default: one "
        "step after the last of run.steps",
    )

    @model_validator(mode="after")
    def _one_curve(self) -> Optimizer:
        if self.schedule == "constant":
            if self.min_lr or self.decay_steps is not None:
                given = "min_lr" if self.min_lr else "decay_steps"
                raise ValueError(f"{given} has no effect with schedule constant; remove it, or use linear or cosine")
        elif self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr ({self.lr:g}); use at most lr")
        elif self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            limit = f"warmup_steps ({self.warmup_steps})"
            raise ValueError(f"decay_steps {self.decay_steps} is not above {limit}, which it includes; use more")
        return self

    @property
    def follows_length(self) -> bool:
        """Whether the learning rate of a step depends on the length of the run."""
        return self.schedule != "constant" and self.decay_steps is None

    def over(self, steps: int) -> Optimizer:
        """Return these options for a model that is updated in `steps` training steps. Its schedule ends one step later,
        so that the last update still moves the weights, unless `decay_steps` says where it ends."""
        return self.model_copy(update={"decay_steps": steps + 1}) if self.follows_length else self


class Critic(Section):
    model: ModelFolder | None = Field(
        default=None,
        description="folder or hub name of the model whose output layer is replaced by a value head; default: "
        "policy.model",
    )
    dtype: Dtype | None = Field(default=None, description="data type of the weights; default: policy.dtype")
    passes: Passes | None = Field(
        default=None, description="forward passes that compute values; default: the fastest that are proved"
    )
    optimizer: Optimizer = Field(description="how the critic's weights are updated")
    value_clip: Annotated[float, Field(gt=0)] | None = Field(
        default=0.2,
        description="bound on how far a value moves from that at the step's start before its loss is clipped; null: no "
        "bound",
    )
    mini_batch_tasks: Count | None = Field(
        default=None, description="tasks per update of the critic; default: those of the algorithm"
    )
    num_iterations: Count | None = Field(
        default=None, description="passes of the critic over a step's tasks; default: those of the algorithm"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="number of first training steps in which only the critic learns"
    )


class Teacher(Section):
    model: ModelFolder = Field(
        description="folder or hub name of the model that is distilled; each token of the policy must be the same text "
        "in its tokenizer; default for a model on a server: the policy's, whose tokens the server must know"
    )
    dtype: Dtype | None = Field(default=None, description="data type of the weights; default: policy.dtype")
    passes: Passes | None = Field(
        default=None, description="forward passes that compute log-probs; default: the fastest that are proved"
    )
    temperature: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="the teacher's logits are divided by this; must be above 0; default: sampling.temperature",
    )
