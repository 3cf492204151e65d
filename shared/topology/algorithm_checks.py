"""Finds options of the sections `algorithm` and `optimizer` that contradict one another or would have no effect.

An option that silently does nothing is worse than an error, because the user believes that it works.
"""

from __future__ import annotations

from proto.limits import MAX_INLINE_BYTES
from shared.topology.algorithm import (
    CLIPS,
    GROUP_ADVANTAGES,
    INVARIANT_ADVANTAGES,
    SAPO_TEMPERATURES,
    Advantage,
    is_function,
)
from shared.topology.document import Found
from shared.topology.schema import Topology

MOST_SAMPLES = MAX_INLINE_BYTES // 4
"""Maximum number of samples in a step, because each of their scalars, with four bytes per sample, is one array in a
message."""
MOST_LIVE_TASKS = 100_000
"""Maximum number of training tasks that may be live at once, so that a snapshot of the scheduler takes no longer than
200 ms."""
_RATIO_IS_ONE = (
    "the ratio is 1 if anchor is proximal and a step has one update; remove it, set anchor to rollout, or configure "
    "several updates (mini_batch_tasks, num_iterations)"
)


def check(topology: Topology) -> Found:
    """Yield every option of `algorithm` that is out of range or has no effect, given the other options."""
    yield from _sizes(topology)
    yield from _rewards(topology)
    yield from _clip(topology)
    yield from _loss_options(topology)
    yield from _mismatch(topology)
    yield from _kl(topology)
    if topology.algorithm.loss.name == "cross_entropy":
        yield from _cross_entropy(topology)
    else:
        yield from _advantage(topology)
        yield from _normalisation(topology)
    yield from _reference(topology)


def _sizes(topology: Topology) -> Found:
    algorithm = topology.algorithm
    tasks, mini, block = (algorithm.tasks_per_step, algorithm.mini_batch_tasks, topology.services.rollout.block_tasks)
    if tasks % mini:
        yield (("algorithm", "mini_batch_tasks"), f"{mini} does not divide tasks_per_step ({tasks}); use a divisor")
    if tasks % block:
        message = f"{block} does not divide algorithm.tasks_per_step ({tasks}); use a divisor or leave it out"
        yield ("services", "rollout", "block_tasks"), message
    samples = tasks * algorithm.group_size
    if samples > MOST_SAMPLES:
        message = (
            f"{tasks} tasks of {algorithm.group_size} samples: a step has at most {MOST_SAMPLES} samples, because each "
            "of their scalars (reward, length) travels in one message; lower it or group_size"
        )
        yield ("algorithm", "tasks_per_step"), message
    live = tasks * (topology.staleness + 1)
    if live > MOST_LIVE_TASKS:
        message = (
            f"{topology.staleness} with {tasks} tasks a step allows {live} live tasks, but at most {MOST_LIVE_TASKS} "
            "are possible; lower it or algorithm.tasks_per_step"
        )
        yield ("staleness",), message
    for index, beta in enumerate(topology.optimizer.betas):
        if not 0 <= beta < 1:
            yield ("optimizer", "betas", index), f"{beta} is out of range: it must be from 0 to below 1, such as 0.9"


def _advantage(topology: Topology) -> Found:
    algorithm = topology.algorithm
    advantage = algorithm.advantage
    path = ("algorithm", "advantage")
    if algorithm.group_size == 1 and advantage.name in GROUP_ADVANTAGES:
        message = f"1 leaves advantage {advantage.name} nothing to compare; use at least 2"
        yield ("algorithm", "group_size"), message
    if advantage.scale is not None and advantage.name != "grpo":
        message = f"{advantage.scale} has no effect with advantage {advantage.name}; remove it, or use grpo"
        yield (*path, "scale"), message
    if advantage.std_epsilon is not None and advantage.scale != "std":
        yield (*path, "std_epsilon"), f"{advantage.std_epsilon} has no effect without scale std; remove it"
    if advantage.params and not is_function(advantage.name):
        yield (*path, "params"), f"have no effect with advantage {advantage.name}, only with my.module:fn; remove them"


def _rewards(topology: Topology) -> Found:
    algorithm = topology.algorithm
    penalty = algorithm.overlong_penalty
    if penalty is not None and penalty.tokens > topology.sampling.max_new_tokens:
        message = f"{penalty.tokens} exceeds sampling.max_new_tokens ({topology.sampling.max_new_tokens}); use less"
        yield ("algorithm", "overlong_penalty", "tokens"), message
    if penalty is not None and topology.workflow is not None:
        message = "counts against sampling.max_new_tokens, which limits one answer, but a workflow's sample has several"
        yield ("algorithm", "overlong_penalty"), f"{message}; remove it, and penalise length in the reward function"
    if algorithm.filter_zero_variance is not None and algorithm.group_size == 1:
        message = "would drop every task: the reward of a group of 1 has no variance; remove it, or raise group_size"
        yield ("algorithm", "filter_zero_variance"), message


def _normalisation(topology: Topology) -> Found:
    algorithm = topology.algorithm
    penalty, kl = algorithm.overlong_penalty, algorithm.kl
    kl_in_reward = kl is not None and kl.place == "reward" and kl.coef > 0
    name = algorithm.advantage.name
    invariant = name in INVARIANT_ADVANTAGES or (name == "grpo" and algorithm.advantage.scale == "std")
    if algorithm.normalise_rewards == "batch" and invariant and penalty is None and not kl_in_reward:
        message = f"batch has no effect: advantage {name} normalises rewards itself; use none, or another advantage"
        yield ("algorithm", "normalise_rewards"), message


def _clip(topology: Topology) -> Found:
    loss = topology.algorithm.loss
    path = ("algorithm", "loss", "clip")
    if loss.clip is None:
        return
    if loss.name not in CLIPS:
        yield path, f"{list(loss.clip)} has no effect with loss {loss.name}; remove it, or use {' or '.join(CLIPS)}"
        return
    low, high = loss.clip
    if topology.algorithm.ratio_is_one:
        yield path, f"{list(loss.clip)} has no effect: {_RATIO_IS_ONE}"
        return
    if loss.clamp == "upper":
        if low != 1:
            message = f"{low} has no effect if clamp is upper; use 1.0 (no lower bound), or set clamp to both"
            yield (*path, 0), message
    elif not 0 < low < 1:
        yield (*path, 0), f"{low} is out of range: it must be above 0 and below 1, such as 0.2"
    if high <= 0:
        yield (*path, 1), f"{high} is out of range: it must be above 0, such as 0.2"


def _loss_options(topology: Topology) -> Found:
    loss = topology.algorithm.loss
    path = ("algorithm", "loss")
    owners = {"dual_clip": "ppo_clip", "clamp": "cispo", "temperatures": "sapo"}
    for key, owner in owners.items():
        value = getattr(loss, key)
        if value is not None and loss.name != owner:
            yield (*path, key), f"{value} has no effect with loss {loss.name}; remove it, or use {owner}"
    if topology.algorithm.ratio_is_one:
        given = {key: getattr(loss, key) for key in ("dual_clip", "clamp", "temperatures")}
        for key, value in given.items():
            if loss.name == owners[key] and value not in (None, SAPO_TEMPERATURES):
                yield (*path, key), f"{value} has no effect: {_RATIO_IS_ONE}"
    elif loss.dual_clip is not None and loss.name == "ppo_clip" and loss.clip and loss.dual_clip <= 1 + loss.clip[1]:
        yield (*path, "dual_clip"), f"{loss.dual_clip} must exceed 1 + clip[1] ({1 + loss.clip[1]}), such as 3.0"
    for index, temperature in enumerate(loss.temperatures or ()):
        if temperature <= 0:
            yield (*path, "temperatures", index), f"{temperature} is out of range: it must be above 0, such as 1.0"
    if loss.params and not is_function(loss.name):
        yield (*path, "params"), f"have no effect with loss {loss.name}, only with my.module:fn; remove them"
    if loss.name == "gspo" and loss.aggregation != "seq_mean_token_mean":
        message = (
            f"{loss.aggregation} does not fit loss gspo, which has one ratio per sequence; use seq_mean_token_mean"
        )
        yield (*path, "aggregation"), message


def _mismatch(topology: Topology) -> Found:
    loss = topology.algorithm.loss
    path = ("algorithm", "loss")
    if loss.anchor == "rollout":
        if loss.tis_cap is not None:
            message = f"{loss.tis_cap} has no effect if anchor is rollout; remove it, or set anchor to proximal"
            yield (*path, "tis_cap"), message
        if loss.ratio_mask is not None:
            message = "has no effect if anchor is rollout; remove it, or set anchor to proximal"
            yield (*path, "ratio_mask"), message
    elif loss.ratio_mask is not None and loss.tis_cap is not None:
        mask = loss.ratio_mask
        if mask.level == "token" and loss.tis_cap >= mask.high:
            message = f"{loss.tis_cap} has no effect: ratio_mask leaves out what exceeds {mask.high}; remove it"
            yield (*path, "tis_cap"), message


def _refresh(topology: Topology) -> Found:
    """Check `refresh_every`. The weights of a refresh are published and kept as a checkpoint, which restores them if a
    store is lost.
    """
    kl, checkpoint = topology.algorithm.kl, topology.checkpoint
    if kl is None or kl.refresh_every is None:
        return
    path, every = ("algorithm", "kl", "refresh_every"), kl.refresh_every
    if every >= topology.run.steps:
        message = f"{every} has no effect: the first refresh would come after the last step ({topology.run.steps})"
        yield path, f"{message}; use less, or leave it out"
    if kl.coef == 0:
        yield path, f"{every} has no effect with coef 0, because no reference is started; remove it"
    if topology.consume == "completion":
        yield path, f"{every} needs consume to be admission, because otherwise it is unknown which step trains a task"
    if every % checkpoint.every:
        message = f"{every} is not a multiple of checkpoint.every ({checkpoint.every}), but a refresh is a checkpoint"
        yield path, f"{message}; use a multiple"
    if checkpoint.keep_every is not None and every % checkpoint.keep_every:
        message = f"{checkpoint.keep_every} would not keep the checkpoints of algorithm.kl.refresh_every ({every})"
        yield ("checkpoint", "keep_every"), f"{message}; use a divisor of it, or leave it out"


def _kl(topology: Topology) -> Found:
    yield from _refresh(topology)
    kl = topology.algorithm.kl
    if kl is not None and kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield ("algorithm", "kl", "estimator"), "k1 as a loss term has zero expected gradient; use k3 or k2"


def _reference(topology: Topology) -> Found:
    kl = topology.algorithm.kl
    if not topology.needs_reference and topology.services.reference is not None:
        coef = "there is no algorithm.kl" if kl is None else "algorithm.kl.coef is 0"
        message = f"has no effect: {coef}, so no reference is started; remove it (null) or set a coef above 0"
        yield ("services", "reference"), message


def _cross_entropy(topology: Topology) -> Found:
    """Find options that shape advantages or rewards. The gradient of this loss uses neither, so they have no effect."""
    algorithm = topology.algorithm
    kl = algorithm.kl
    none_given = Advantage()
    for name, value in algorithm.advantage:
        if value != getattr(none_given, name):
            shown = "" if name == "params" else f"{value} "
            message = f"{shown}has no effect with loss cross_entropy, which does not use advantages; remove it"
            yield ("algorithm", "advantage", name), message
    given = {
        "overlong": algorithm.overlong != "keep",
        "filter_zero_variance": algorithm.filter_zero_variance is not None,
        "overlong_penalty": algorithm.overlong_penalty is not None,
        "normalise_rewards": algorithm.normalise_rewards != "none",
    }
    for key, is_given in given.items():
        if is_given:
            why = "does not cut answers" if key == "overlong" else "does not use rewards"
            yield ("algorithm", key), f"has no effect with loss cross_entropy, which {why}; remove it"
    if algorithm.group_size > 1:
        message = f"{algorithm.group_size} would be copies of one answer with loss cross_entropy; use 1"
        yield ("algorithm", "group_size"), message
    if topology.sampling.stop and not topology.data.eval:
        message = (
            f"{list(topology.sampling.stop)} has no effect without data.eval, because loss cross_entropy trains on the"
        )
        yield ("sampling", "stop"), f"{message} rows' answers as they are; remove it"
    if topology.workflow is not None:
        yield ("workflow",), "has no effect with loss cross_entropy, which learns from the rows' answers; remove it"
    if kl is not None and kl.place == "reward" and kl.coef > 0:
        message = "reward has no effect with loss cross_entropy, which does not use rewards; use loss"
        yield ("algorithm", "kl", "in"), message
    if algorithm.loss.anchor == "proximal":
        message = "proximal has no effect with loss cross_entropy, which has no ratio; remove it"
        yield ("algorithm", "loss", "anchor"), message
