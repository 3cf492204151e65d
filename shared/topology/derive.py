"""Fills in defaults that follow from other keys, before validation. Values in the document are not replaced.

It works on the raw document. Each rule is skipped if a value that it needs is missing or of the wrong kind; validation
reports such values.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeGuard

from shared.topology.algorithm import (
    BETAS,
    CLIPS,
    FROM_ROWS,
    NO_REWARD,
    PREFERENCES,
    REFERENCED,
    SAPO_TEMPERATURES,
    SIMPO_MARGIN,
    TOKEN_ADVANTAGES,
)
from shared.topology.models import REWARD_MODEL, REWARD_MODEL_SECTION
from shared.topology.services import LeaseSettings

# One lease keeps an engine busy with about this many samples or more.
_LEASE_SAMPLES = 256
# Measured on a CPU with the embedded engine: twice the samples per lease shorten a step of 64 groups of 8 by 7 %
# (staleness 1 and 0), although the reference then scores no samples while others are generated.
_EMBEDDED_LEASE_SAMPLES = 512
_PARTIAL_S = 10.0
_TRANSFER_OF_LEASE = 2 / 3
_LEASE_S: float = LeaseSettings.model_fields["lease_s"].default
_TIS_CAP = 2.0
_TOP_K = 64
_STD_EPSILON = 1e-6


def fill(data: dict[str, Any]) -> None:
    """Set in place mini_batch_tasks, omitted options of advantage, loss, critic and teacher, a reward that is left out,
    services.critic, reference, teacher and reward-model, reward_model.model, rollout.block_tasks, rollout.partial_s
    and transfer_s, and checkpoint.keep_every for a reference that is refreshed."""
    algorithm = data.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    loss = algorithm.get("loss")
    loss_name = loss.get("name") if isinstance(loss, dict) else None
    if loss_name in PREFERENCES:
        algorithm.setdefault("group_size", 2)
        if data.get("reward") is None:
            data["reward"] = {"function": NO_REWARD}
    tasks, group = algorithm.get("tasks_per_step"), algorithm.get("group_size")
    if _count(tasks):
        algorithm.setdefault("mini_batch_tasks", tasks)
    _fill_advantage(algorithm)
    _fill_loss(data, algorithm)
    services = _section(data, "services")
    if services is None:
        return
    _fill_critic(data, algorithm, services)
    _fill_teacher(data, algorithm, services)
    _fill_reward_model(data, services)
    kl = algorithm.get("kl")
    refresh = kl.get("refresh_every") if isinstance(kl, dict) else None
    checkpoint = _section(data, "checkpoint") if refresh is not None else None
    if checkpoint is not None and checkpoint.get("keep_every") is None:
        checkpoint["keep_every"] = refresh
    coef = kl.get("coef") if isinstance(kl, dict) else None
    policy = data.get("policy")
    adapted = isinstance(policy, dict) and policy.get("lora") is not None  # then the trainer is the reference, too
    run = data.get("run")
    evaluates = isinstance(run, dict) and run.get("evaluate") is True
    compared = (isinstance(coef, int | float) and coef > 0) or (loss_name in REFERENCED and not evaluates)
    if compared and services.get("reference") is None and not adapted:
        services["reference"] = {}
    rollout = _section(services, "rollout")
    if rollout is not None and _count(tasks) and _count(group) and _count(rollout.get("instances", 1)):
        samples = _lease_samples(data, rollout, step_samples=tasks * group)
        rollout.setdefault("block_tasks", _lease_block(tasks, group, rollout.get("instances", 1), samples))
    if rollout is not None and _samples_single_answers(data, algorithm, rollout):
        rollout.setdefault("partial_s", _PARTIAL_S)
    if rollout is not None and rollout.get("weights", "shards") != "shards":
        lease = data.get("lease")
        lease_s = lease.get("lease_s", _LEASE_S) if isinstance(lease, dict) else _LEASE_S
        if isinstance(lease_s, int | float) and lease_s > 0 and rollout.get("transfer_s") is None:
            rollout["transfer_s"] = lease_s * _TRANSFER_OF_LEASE


def _samples_single_answers(data: dict[str, Any], algorithm: dict[str, Any], rollout: dict[str, Any]) -> bool:
    """Return whether unfinished samples can be continued (see `checks`)."""
    run, loss, sampling = data.get("run"), algorithm.get("loss"), data.get("sampling")
    engine = rollout.get("engine", "transformers")
    return (
        (engine == "transformers" or (engine == "vllm" and not (isinstance(sampling, dict) and sampling.get("stop"))))
        and data.get("workflow") is None
        and algorithm.get("router_replay") != "rollout"
        and not (isinstance(run, dict) and run.get("deterministic"))
        and not (isinstance(loss, dict) and loss.get("name") in FROM_ROWS)
    )


def _lease_samples(data: dict[str, Any], rollout: dict[str, Any], step_samples: int) -> int:
    """Return the maximum number of samples per lease.

    Engines that take turns with other services on the same devices sample one lease at a time and wait for its longest
    sample, so an engine that refills its own batch is given its whole share of a step at once.
    """
    placement, engine = data.get("placement"), rollout.get("engine", "transformers")
    together = placement.get("colocate") if isinstance(placement, dict) else None
    if engine == "vllm" and isinstance(together, list) and "rollout" in together:
        return step_samples
    return _EMBEDDED_LEASE_SAMPLES if engine == "transformers" and data.get("workflow") is None else _LEASE_SAMPLES


def _lease_block(tasks_per_step: int, group_size: int, instances: int, samples: int) -> int:
    """Return the number of tasks per lease: the largest divisor of `tasks_per_step` that is at most an engine's equal
    share of the step (rounded up) and that keeps a lease within `samples` samples. Return 1 if a single group has more
    samples than that.

    A divisor is needed because a lease that spans two steps would have two oldest versions to sample with.
    """
    most = min(math.ceil(tasks_per_step / instances), samples // group_size)
    return max((d for d in range(1, most + 1) if tasks_per_step % d == 0), default=1)


def _fill_loss(data: dict[str, Any], algorithm: dict[str, Any]) -> None:
    loss = _section(algorithm, "loss")
    if loss is None:
        return
    one_update = algorithm.get("num_iterations", 1) == 1 and algorithm.get("mini_batch_tasks") == algorithm.get(
        "tasks_per_step"
    )
    if "anchor" not in loss:
        on_policy = one_update and data.get("staleness", 1) == 0
        # these losses have no ratio, so the forward pass for one would be wasted
        loss["anchor"] = "rollout" if on_policy or loss.get("name") in FROM_ROWS else "proximal"
    if loss["anchor"] == "proximal" and loss.get("tis_cap") is None and loss.get("ratio_mask") is None:
        loss["tis_cap"] = _TIS_CAP
    name = loss.get("name", "ppo_clip")
    ratio_is_one = one_update and loss["anchor"] == "proximal"  # then there is nothing to clip
    if name == "cispo" and loss.get("clamp") is None and not ratio_is_one:
        loss["clamp"] = "upper"
    if isinstance(name, str) and name in CLIPS and loss.get("clip") is None and not ratio_is_one:
        loss["clip"] = list(CLIPS["ppo_clip" if loss.get("clamp") == "both" else name])
    if isinstance(name, str) and name in BETAS and loss.get("beta") is None:
        loss["beta"] = BETAS[name]
    if name == "simpo" and loss.get("margin") is None:
        loss["margin"] = SIMPO_MARGIN
    if name == "sapo" and loss.get("temperatures") is None:
        loss["temperatures"] = list(SAPO_TEMPERATURES)


def _fill_critic(data: dict[str, Any], algorithm: dict[str, Any], services: dict[str, Any]) -> None:
    critic, policy = data.get("critic"), data.get("policy")
    if not isinstance(critic, dict) or not isinstance(policy, dict):
        return
    defaults = {
        "model": policy.get("model"),
        "dtype": policy.get("dtype", "float32"),
        "mini_batch_tasks": algorithm.get("mini_batch_tasks"),
        "num_iterations": algorithm.get("num_iterations", 1),
    }
    for key, value in defaults.items():
        if critic.get(key) is None and value is not None:
            critic[key] = value
    trainer, own = services.get("policy-trainer") or {}, services.get("critic") or {}
    if isinstance(trainer, dict) and isinstance(own, dict):
        services["critic"] = {**copy.deepcopy(trainer), **own}


def _fill_teacher(data: dict[str, Any], algorithm: dict[str, Any], services: dict[str, Any]) -> None:
    advantage, loss = algorithm.get("advantage"), algorithm.get("loss")
    names = [part.get("name") for part in (advantage, loss) if isinstance(part, dict)]
    if ("none" in names or "cross_entropy" in names) and data.get("reward") is None:
        data["reward"] = {"function": NO_REWARD}
    distill = algorithm.get("distill")
    if isinstance(distill, dict) and distill.get("kl") == "forward" and distill.get("top_k") is None:
        distill["top_k"] = _TOP_K
    teacher, policy, sampling = data.get("teacher"), data.get("policy"), data.get("sampling")
    if not isinstance(teacher, dict) or not isinstance(policy, dict) or not isinstance(sampling, dict):
        return
    settings = services.get("teacher")
    if isinstance(settings, dict) and settings.get("backend") == "server" and teacher.get("model") is None:
        teacher["model"] = policy.get("model")  # whose tokens the server is asked about
    if teacher.get("dtype") is None:
        teacher["dtype"] = policy.get("dtype", "float32")
    if teacher.get("temperature") is None:
        teacher["temperature"] = sampling.get("temperature", 1.0)
    if services.get("teacher") is None:
        services["teacher"] = {}


def _fill_reward_model(data: dict[str, Any], services: dict[str, Any]) -> None:
    reward, section = data.get("reward"), data.get(REWARD_MODEL_SECTION)
    if isinstance(reward, dict) and reward.get("model") is not None and isinstance(section or {}, dict):
        section = data[REWARD_MODEL_SECTION] = {"model": reward["model"]} | (section or {})
    if isinstance(section, dict) and services.get(REWARD_MODEL) is None:
        services[REWARD_MODEL] = {}


def _fill_advantage(algorithm: dict[str, Any]) -> None:
    advantage, loss = _section(algorithm, "advantage"), algorithm.get("loss")
    from_rows = isinstance(loss, dict) and loss.get("name") in FROM_ROWS
    if advantage is None or from_rows:
        return
    name = advantage.get("name", "grpo")
    if name in TOKEN_ADVANTAGES and advantage.get("gamma") is None:
        advantage["gamma"] = 1.0
    if name == "gae":
        if advantage.get("lam") is None:
            advantage["lam"] = 1.0
        if advantage.get("lam_value") is None:
            advantage["lam_value"] = advantage["lam"]
        if advantage.get("truncated") is None:
            advantage["truncated"] = "end"
    if (name in TOKEN_ADVANTAGES or advantage.get("per") == "token") and advantage.get("whiten") is None:
        advantage["whiten"] = "step"
    if name != "grpo":
        return
    if advantage.get("scale") is None:
        advantage["scale"] = "std"
    if advantage["scale"] == "std" and advantage.get("std_epsilon") is None:
        advantage["std_epsilon"] = _STD_EPSILON


def _section(data: dict[str, Any], key: str) -> dict[str, Any] | None:
    section = data.setdefault(key, {})
    return section if isinstance(section, dict) else None


def _count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
