"""Finds the faults in a well-formed topology: contradicting keys, missing files, and limits too small for the run.
Options without effect are faults, too, because a user believes that an option works.

It neither changes the topology nor inspects anything that is running (ports, folders in use). A check yields
`(path, message)`. The message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path as FilePath

from proto.limits import MAX_INLINE_BYTES
from shared.data.open import absent, matching_files, split_parameters
from shared.evaluation import PART, scores
from shared.names import EVALUATION_PREFIX, is_text, shown
from shared.topology import (
    critic_checks,
    distill_checks,
    expert_checks,
    hub,
    lora_checks,
    monitor,
    reward_checks,
    row_checks,
    serve,
    service_checks,
)
from shared.topology.algorithm import (
    CLIPS,
    GROUP_ADVANTAGES,
    INVARIANT_ADVANTAGES,
    MAX_CREDIT_TASKS,
    SAPO_TEMPERATURES,
    TOKEN_ADVANTAGES,
    is_function,
)
from shared.topology.capacity import held_tasks, limit_bytes, version_bytes, weight_versions, worst_case_bytes
from shared.topology.document import Found
from shared.topology.fields import format_size
from shared.topology.model_files import read_config, stored_tensors
from shared.topology.models import REWARD_MODEL
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
    """Yield every contradiction, missing file and insufficient limit in `topology`."""
    if topology.serve is not None:
        yield from serve.check(topology.serve, topology.services, topology.placement)
        yield from _files(topology)
        yield from service_checks.check(topology)
        yield from monitor.check(topology.monitor)
        yield from _deterministic(topology)
        return
    yield from _files(topology)
    yield from _sizes(topology)
    yield from _rewards(topology)
    yield from _clip(topology)
    yield from _loss_options(topology)
    yield from _mismatch(topology)
    yield from _kl(topology)
    yield from row_checks.check(topology)
    if not topology.algorithm.loss.from_rows:
        yield from _advantage(topology)
        yield from _normalisation(topology)
    yield from _retry(topology)
    yield from _evaluation(topology)
    yield from _lengths(topology)
    yield from critic_checks.check(topology)
    yield from distill_checks.check(topology)
    yield from reward_checks.check(topology)
    yield from lora_checks.check(topology)
    yield from expert_checks.check(topology)
    yield from service_checks.check(topology)
    yield from monitor.check(topology.monitor)
    yield from _train_sources(topology)
    yield from _deterministic(topology)
    yield from _memory(topology)


def _files(topology: Topology) -> Found:
    for model, names in topology.model_folders().items():
        path, folder = (names[0], "model"), FilePath(model)
        if not folder.is_dir():
            yield path, _absent(hub.model_name(model), f"no folder {folder}", "put the model there")
        elif not (folder / "config.json").is_file():
            message = f"{folder} has no config.json, which every model folder has; save the model with save_pretrained"
            yield path, message
        elif not any(folder.glob("*.safetensors")):
            message = f"{folder} has no *.safetensors, the only supported format; save the model as safetensors"
            yield path, message
    for key, source in topology.data.sources.items():
        where = (*key.split("."),)
        scheme, _, rest = source.partition(":")
        file, _ = split_parameters(rest)
        if scheme == "hub" or (scheme in ("jsonl", "parquet") and not any(map(FilePath.is_file, matching_files(file)))):
            yield where, _absent(hub.source_name(source), absent(file), "put it there")
        for match in matching_files(file):
            if not is_text(match):
                yield where, f"{shown(match)}: its name is not UTF-8; rename it"
        if scheme == "datasets" and not FilePath(file).is_dir():
            yield where, _absent(None, f"no folder {file}", "put it there")


def _train_sources(topology: Topology) -> Found:
    """Check what the sources of the training set set on their own."""
    train, where = topology.data.train, ("data", "train")
    unused = "has no effect on the prompts of a workflow, which writes its own"
    if train.truncate != "drop" and topology.workflow is not None:
        yield (*where, "truncate"), f"{train.truncate} {unused}; use drop"
    for name, chosen in train.sources.items():
        path = (*where, "sources", name)
        if chosen.chat_template and topology.workflow is not None:
            yield (*path, "chat_template"), f"{unused}; set policy.chat_template.args"
        most, own = train.max_prompt_tokens, chosen.max_prompt_tokens
        if most is not None and own is not None and own > most:
            message = f"{own} is above data.train.max_prompt_tokens ({most}), for which room is reserved; raise that"
            yield (*path, "max_prompt_tokens"), f"{message}, or use at most {most}"


def _absent(name: hub.HubName | None, text: str, remedy: str) -> str:
    if name is None:
        return f"{text}; relative paths start at the topology's folder; {remedy}"
    return f"{name} is not in the local Hugging Face cache {hub.cache()}; fetch it with: {name.command}"


def _retry(topology: Topology) -> Found:
    retry = topology.reward.retry
    path = ("reward", "retry")
    if retry.max_backoff_s < retry.backoff_s:
        message = f"{retry.max_backoff_s:g} is less than backoff_s ({retry.backoff_s:g}); use that or more"
        yield (*path, "max_backoff_s"), message
    defaults = type(retry)()
    for name in ("backoff_s", "max_backoff_s") if not retry.limit_s else ():
        value = getattr(retry, name)
        if value != getattr(defaults, name):
            yield (*path, name), f"{value:g} has no effect with limit_s 0, which allows no retries; remove it"


def _evaluation(topology: Topology) -> Found:
    if topology.run.name.startswith(EVALUATION_PREFIX) and not topology.run.evaluate:
        message = f"{topology.run.name!r} begins with {EVALUATION_PREFIX!r}, as the names of evaluations do; change it"
        yield ("run", "name"), message
    if topology.run.evaluate and not topology.data.eval:
        yield ("run", "evaluate"), "true, but data.eval has no evaluation set; add one"
    for name, evaluation in topology.data.eval.items():
        if name == "train":
            yield ("data", "eval", name), "'train' is the name of the training split; use another name"
        if evaluation.temperature == 0 and evaluation.samples > 1:
            message = f"{evaluation.samples} samples at temperature 0 are all the same; use 1, or a temperature above 0"
            yield ("data", "eval", name, "samples"), message

    metric = topology.checkpoint.keep_best
    metrics = [
        f"eval/{name}/{score}" for name, chosen in topology.data.eval.items() for score in scores(chosen.samples)
    ]
    named = re.fullmatch(f"eval/([^/]+)/{PART}.+", metric or "")  # only the run tells which rewards have names
    if metric is not None and metric not in metrics and (named is None or named[1] not in topology.data.eval):
        near = difflib.get_close_matches(metric, metrics, n=1, cutoff=0.0)
        remedy = f"use {near[0]}" if near else "there is no evaluation set in data.eval; add one"
        yield ("checkpoint", "keep_best"), f"no evaluation produces {metric!r}; {remedy}"


def _lengths(topology: Topology) -> Found:
    """Check that the longest sample fits the model's positions and a micro-batch.

    Without max_prompt_tokens, only its completion counts.
    """
    prompt, new = topology.data.train.max_prompt_tokens or 0, topology.sampling.max_new_tokens
    said = f"{prompt} prompt tokens (data.train.max_prompt_tokens) and {new} new" if prompt else f"{new} new tokens"
    positions = read_config(topology.policy.model).get("max_position_embeddings")
    if isinstance(positions, int) and prompt + new > positions:
        message = f"{said} exceed the model's {positions} positions; lower one of them"
        yield ("sampling", "max_new_tokens"), message
    for key, service in topology.services.scorers.items():
        if key == REWARD_MODEL:
            continue  # it reads other tokens (`reward_checks`)
        limit, longest = service.max_tokens_per_micro_batch, prompt + new
        if topology.workflow is not None:
            longest, said = topology.workflow.max_tokens, f"{topology.workflow.max_tokens} tokens (workflow.max_tokens)"
        if longest > limit:
            message = f"{limit} is less than one sample: {said}; use at least {longest}"
            yield ("services", key, "max_tokens_per_micro_batch"), message


def _deterministic(topology: Topology) -> Found:
    if not topology.run.deterministic:
        return
    if topology.services.rollout.engine != "transformers":
        message = f"{topology.services.rollout.engine} is not batch-invariant; run.deterministic needs transformers"
        yield ("services", "rollout", "engine"), message
    if topology.services.rollout.in_flight != "wait":
        message = f"{topology.services.rollout.in_flight} depends on timing; run.deterministic needs wait"
        yield ("services", "rollout", "in_flight"), message
    for key, scorer in topology.services.scorers.items():
        if scorer.backend != "torch":
            message = f"{scorer.backend} is not proved to give bit-identical results; run.deterministic needs torch"
            yield ("services", key, "backend"), message
    for key, service in topology.services.placed.items():
        if service.gpus:
            message = f"{service.gpus}: a GPU is not proved to give bit-identical results; run.deterministic needs 0"
            yield ("services", key, "gpus"), message
    if topology.workflow is not None:
        yield ("workflow",), "the calls of a workflow have no fixed order; run.deterministic needs it left out"
    if topology.consume != "order":
        yield ("consume",), f"{topology.consume} depends on timing; run.deterministic needs order"
    if topology.algorithm.filter_zero_variance is not None:
        yield (("algorithm", "filter_zero_variance"), "refills depend on timing; run.deterministic needs it left out")


def _memory(topology: Topology) -> Found:
    for folder, names in topology.model_folders().items():
        try:
            stored_tensors(folder)
        except (OSError, ValueError) as error:
            yield (names[0], "model"), f"{error}; save the model again"
            return
    weights = version_bytes(topology.policy_model)
    # Without max_prompt_tokens this is a lower bound: the longest prompt is not known until the data set has been read.
    needed = worst_case_bytes(topology, topology.data.train.max_prompt_tokens or 0, weights)
    limit = limit_bytes(topology)
    if limit < needed:
        message = (
            f"{limit} bytes ({format_size(limit)}) cannot hold {held_tasks(topology)} tasks of "
            f"{topology.algorithm.group_size} samples and {weight_versions(topology)} weight versions of "
            f"{format_size(weights)} at a time; set at least {needed} ({format_size(needed)}) or lower staleness, "
            f"tasks_per_step, group_size{', reward_model.max_tokens' * bool(topology.read_tokens)} or max_new_tokens"
        )
        yield ("services", "batch-store", "memory"), message


def _sizes(topology: Topology) -> Found:
    algorithm = topology.algorithm
    tasks, mini, block = (algorithm.tasks_per_step, algorithm.mini_batch_tasks, topology.services.rollout.block_tasks)
    if tasks % mini:
        yield (("algorithm", "mini_batch_tasks"), f"{mini} does not divide tasks_per_step ({tasks}); use a divisor")
    if tasks % block:
        message = f"{block} does not divide algorithm.tasks_per_step ({tasks}); use a divisor or leave it out"
        yield ("services", "rollout", "block_tasks"), message
    samples = tasks * algorithm.group_size
    most = MOST_SAMPLES // 2 if algorithm.loss.compares else MOST_SAMPLES  # scores are float64
    if samples > most:
        message = (
            f"{tasks} tasks of {algorithm.group_size} samples: a step has at most {most} samples, because each "
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
    if advantage.per is not None and not is_function(advantage.name):
        message = f"{advantage.per} has no effect with advantage {advantage.name}, only with my.module:fn; remove it"
        yield (*path, "per"), message
    if advantage.gamma is not None and advantage.name not in TOKEN_ADVANTAGES:
        message = f"{advantage.gamma} has no effect with advantage {advantage.name}; remove it, or use reinforce or gae"
        yield (*path, "gamma"), message
    if advantage.whiten is not None and not advantage.per_token:
        message = f"{advantage.whiten} has no effect with advantage {advantage.name}, which is one number per sample"
        yield (*path, "whiten"), f"{message}; remove it"
    if advantage.whiten == "mini_batch" and algorithm.mini_batch_tasks == algorithm.tasks_per_step:
        message = (
            f"mini_batch is the whole step, because mini_batch_tasks is tasks_per_step ({algorithm.tasks_per_step})"
        )
        yield (*path, "whiten"), f"{message}; use step, or smaller mini-batches"
    if advantage.per_token and algorithm.tasks_per_step > MAX_CREDIT_TASKS:
        message = f"{algorithm.tasks_per_step} is more than the {MAX_CREDIT_TASKS} that a step with an advantage per"
        yield ("algorithm", "tasks_per_step"), f"{message} token ({advantage.name}) may have; use fewer"


def _rewards(topology: Topology) -> Found:
    algorithm = topology.algorithm
    penalty = algorithm.overlong_penalty
    if penalty is not None and penalty.tokens > topology.sampling.max_new_tokens:
        message = f"{penalty.tokens} exceeds sampling.max_new_tokens ({topology.sampling.max_new_tokens}); use less"
        yield ("algorithm", "overlong_penalty", "tokens"), message
    if penalty is not None and topology.workflow is not None:
        message = "counts against sampling.max_new_tokens, which limits one answer, but a workflow's sample has several"
        yield ("algorithm", "overlong_penalty"), f"{message}; remove it, and penalise length in the reward function"
    if algorithm.filter_zero_variance is not None and algorithm.group_size == 1 and not algorithm.loss.from_rows:
        message = "would drop every task: the reward of a group of 1 has no variance; remove it, or raise group_size"
        yield ("algorithm", "filter_zero_variance"), message


def _normalisation(topology: Topology) -> Found:
    algorithm = topology.algorithm
    penalty = algorithm.overlong_penalty
    name = algorithm.advantage.name
    invariant = name in INVARIANT_ADVANTAGES or (name == "grpo" and algorithm.advantage.scale == "std")
    if algorithm.normalise_rewards == "batch" and invariant and penalty is None and algorithm.reward_kl is None:
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
    if not topology.needs_reference and topology.services.reference is not None:
        coef = "there is no algorithm.kl" if kl is None else "algorithm.kl.coef is 0"
        message = f"has no effect: {coef}, so no reference is started; remove it (null) or set a coef above 0"
        yield ("services", "reference"), message
