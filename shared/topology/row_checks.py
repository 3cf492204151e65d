"""Finds the faults of runs whose loss learns from the rows' answers (`Loss.from_rows`): options of sampling, rewards
and advantages, which have no effect on them, and pairs of a loss and an output layer that do not fit.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from shared.topology.algorithm import REFERENCED, Advantage, Loss
from shared.topology.document import Found
from shared.topology.models import POLICY
from shared.topology.schema import Topology
from shared.topology.services import Rollout

_LOSS = ("algorithm", "loss")
_ENGINE_KEYS = ("engine", "gpus", "parallel", "engine_args", "weights", "in_flight")
"""Keys of `services.rollout` that only an engine reads."""


def check(topology: Topology) -> Found:
    """Yield every option without effect, and every contradiction."""
    yield from _options(topology)
    yield from _head(topology)
    loss = topology.algorithm.loss
    if not loss.from_rows:
        return
    yield from _advantages(topology)
    yield from _sampling(topology)
    if loss.compares:
        yield from _pairs(topology)
    elif topology.algorithm.group_size > 1:
        message = f"{topology.algorithm.group_size} would be copies of one answer with loss {loss.name}; use 1"
        yield ("algorithm", "group_size"), message
    if not topology.samples:
        yield from _engine(topology)


def _options(topology: Topology) -> Found:
    """Check the options that only some losses have."""
    loss = topology.algorithm.loss
    for key, owners in {"beta": ("dpo", "ipo", "simpo"), "margin": ("simpo",)}.items():
        value = getattr(loss, key)
        if value is not None and loss.name not in owners:
            message = f"{value} has no effect with loss {loss.name}; remove it, or use {' or '.join(owners)}"
            yield (*_LOSS, key), message


def _head(topology: Topology) -> Found:
    """Check that the output layer computes what the loss learns from, in a run that can have it."""
    policy, loss = topology.policy, topology.algorithm.loss
    path = (POLICY, "head")
    if policy.head == "language":
        if loss.name == "bradley_terry":
            yield path, "language has no value at the end of an answer, which loss bradley_terry compares; use value"
        return
    if loss.name != "bradley_terry":
        message = f"value is for loss bradley_terry, but the loss is {loss.name}, which needs log-probs; use language"
        yield path, message
    if policy.lora is not None:
        yield (POLICY, "lora"), "has no value head (policy.head); remove one of them"
    for name in topology.data.eval:
        message = "samples from the policy, but a model with a value head (policy.head) samples nothing; remove the set"
        yield ("data", "eval", name), message


def _advantages(topology: Topology) -> Found:
    """Find options that shape advantages or rewards. The gradient of these losses uses neither."""
    algorithm, loss = topology.algorithm, topology.algorithm.loss.name
    none_given = Advantage()
    for name, value in algorithm.advantage:
        if value != getattr(none_given, name):
            shown = "" if name == "params" else f"{value} "
            message = f"{shown}has no effect with loss {loss}, which does not use advantages; remove it"
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
            yield ("algorithm", key), f"has no effect with loss {loss}, which {why}; remove it"
    if algorithm.reward_kl is not None:
        message = f"reward has no effect with loss {loss}, which does not use rewards; use loss"
        yield ("algorithm", "kl", "in"), message if not algorithm.loss.compares else f"{message[:-10]}remove it"
    if algorithm.loss.anchor == "proximal":
        message = f"proximal has no effect with loss {loss}, which has no ratio; remove it"
        yield (*_LOSS, "anchor"), message


def _sampling(topology: Topology) -> Found:
    loss, stop = topology.algorithm.loss.name, list(topology.sampling.stop)
    if stop and not topology.data.eval:
        message = f"{stop} has no effect without data.eval, because loss {loss} trains on the"
        yield ("sampling", "stop"), f"{message} rows' answers as they are; remove it"
    if topology.workflow is not None:
        yield ("workflow",), f"has no effect with loss {loss}, which learns from the rows' answers; remove it"


def _pairs(topology: Topology) -> Found:
    """Check a run whose loss compares the two answers of each row."""
    algorithm, loss = topology.algorithm, topology.algorithm.loss
    if algorithm.group_size != 2:
        message = f"{algorithm.group_size}: loss {loss.name} compares the two answers of a row; use 2, or leave it out"
        yield ("algorithm", "group_size"), message
    if algorithm.updates_per_step > 1:
        key = "num_iterations" if algorithm.num_iterations > 1 else "mini_batch_tasks"
        message = f"{getattr(algorithm, key)} makes {algorithm.updates_per_step} updates per step, but the coefficients"
        yield (
            ("algorithm", key),
            f"{message} of loss {loss.name} hold for one; leave it out, and use fewer tasks_per_step",
        )
    if loss.aggregation != Loss().aggregation:
        message = f"{loss.aggregation} has no effect with loss {loss.name}, the mean over the pairs; remove it"
        yield (*_LOSS, "aggregation"), message
    if algorithm.entropy_coef:
        yield ("algorithm", "entropy_coef"), f"{algorithm.entropy_coef} has no effect with loss {loss.name}; remove it"
    if algorithm.kl is not None and algorithm.reward_kl is None:
        compared = " compares with the reference itself" if loss.name in REFERENCED else " has no such term"
        yield ("algorithm", "kl"), f"has no effect with loss {loss.name}, which{compared}; remove it"
    if topology.sampling.temperature != 1.0:
        message = f"{topology.sampling.temperature} has no effect with loss {loss.name}, whose log-probs are at 1"
        yield ("sampling", "temperature"), f"{message}; remove it"


def _engine(topology: Topology) -> Found:
    """Find settings of an engine in a run that starts none."""
    rollout, defaults = topology.services.rollout, Rollout()
    why = f"no engine is started, because loss {topology.algorithm.loss.name} samples nothing and there is no data.eval"
    for key in _ENGINE_KEYS:
        value = getattr(rollout, key)
        if value != getattr(defaults, key):
            shown = f"{value} " if isinstance(value, str | int) else ""
            yield ("services", "rollout", key), f"{shown}has no effect: {why}; remove it"
    if "rollout" in topology.placement.colocate:
        at = topology.placement.colocate.index("rollout")
        yield ("placement", "colocate", at), f"rollout has no devices: {why}; leave it out"
