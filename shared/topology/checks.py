"""Finds the faults in a well-formed topology: contradicting keys, missing files, and limits too small for the run.

It neither changes the topology nor inspects anything that is running (ports, folders in use). A check yields
`(path, message)`. The message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from pathlib import Path as FilePath

from proto.limits import MAX_INLINE_BYTES
from shared.data.files import matching_files, split_parameters
from shared.names import is_text, shown
from shared.topology import (
    algorithm_checks,
    colocate_checks,
    engine_checks,
    hub,
    monitor_traces,
    monitor_web,
    split_checks,
)
from shared.topology.capacity import held_tasks, limit_bytes, weight_bytes, weight_versions, worst_case_bytes
from shared.topology.fields import format_size
from shared.topology.model_files import read_config
from shared.topology.problem import Found, Path
from shared.topology.schema import Topology
from shared.topology.services import DEVICE_SERVICE

MOST_SAMPLES = MAX_INLINE_BYTES // 4
"""Maximum number of samples in a step, because each of their scalars, with four bytes per sample, is one array in a
message."""
MOST_LIVE_TASKS = 100_000
"""Maximum number of training tasks that may be live at once, so that a snapshot of the scheduler takes no longer than
200 ms."""


def check(topology: Topology) -> Found:
    """Yield every contradiction, missing file and insufficient limit in `topology`."""
    yield from _files(topology)
    yield from _algorithm(topology)
    yield from algorithm_checks.check(topology)
    yield from _reference(topology)
    yield from _retry(topology)
    yield from _evaluation(topology)
    yield from _lengths(topology)
    yield from _services(topology)
    yield from split_checks.check(topology)
    yield from _placement(topology)
    yield from colocate_checks.check(topology)
    yield from engine_checks.check(topology)
    yield from _partial(topology)
    yield from _transport(topology)
    yield from monitor_web.check(topology.services.monitor.web)
    yield from monitor_traces.check(topology.services.monitor.prometheus, topology.services.monitor.traces)
    yield from _deterministic(topology)
    yield from _memory(topology)


def _files(topology: Topology) -> Found:
    model = FilePath(topology.policy.model)
    path = ("policy", "model")
    if not model.is_dir():
        yield path, _absent(hub.model_name(topology.policy.model), f"no folder {model}", "put the model there")
    elif not (model / "config.json").is_file():
        yield (path, f"{model} has no config.json, which every model folder has; save the model with save_pretrained")
    elif not any(model.glob("*.safetensors")):
        yield (path, f"{model} has no *.safetensors, the only supported format; save the model as safetensors")
    sources: dict[Path, str] = {("data", "train", "source"): topology.data.train.source}
    sources |= {("data", "eval", name, "source"): each.source for name, each in topology.data.eval.items()}
    for where, source in sources.items():
        scheme, _, rest = source.partition(":")
        file, _ = split_parameters(rest)
        if scheme == "hub" or (scheme in ("jsonl", "parquet") and not any(map(FilePath.is_file, matching_files(file)))):
            yield where, _absent(hub.source_name(source), f"no file {file}", "put it there")
        for each in matching_files(file):
            if not is_text(each):
                yield where, f"{shown(each)}: its name is not UTF-8; rename it"
        if scheme == "datasets" and not FilePath(file).is_dir():
            yield where, _absent(None, f"no folder {file}", "put it there")


def _absent(name: hub.HubName | None, text: str, remedy: str) -> str:
    if name is None:
        return f"{text}; relative paths start at the topology's folder; {remedy}"
    return f"{name} is not in the local Hugging Face cache {hub.cache()}; fetch it with: {name.command}"


def _algorithm(topology: Topology) -> Found:
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


def _reference(topology: Topology) -> Found:
    kl = topology.algorithm.kl
    if not topology.needs_reference and topology.services.reference is not None:
        coef = "there is no algorithm.kl" if kl is None else "algorithm.kl.coef is 0"
        message = f"has no effect: {coef}, so no reference is started; remove it (null) or set a coef above 0"
        yield ("services", "reference"), message


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
    if topology.run.evaluate and not topology.data.eval:
        yield ("run", "evaluate"), "true, but data.eval has no evaluation set; add one"
    for name, each in topology.data.eval.items():
        if name == "train":
            yield ("data", "eval", name), "'train' is the name of the training split; use another name"
        if each.temperature == 0 and each.samples > 1:
            message = f"{each.samples} samples at temperature 0 are all the same; use 1, or a temperature above 0"
            yield ("data", "eval", name, "samples"), message

    metric, known = topology.checkpoint.keep_best, _evaluated_metrics(topology)
    if metric is not None and metric not in known:
        near = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)
        remedy = f"use {near[0]}" if near else "there is no evaluation set in data.eval; add one"
        yield ("checkpoint", "keep_best"), f"no evaluation produces {metric!r}; {remedy}"


def _evaluated_metrics(topology: Topology) -> list[str]:
    """Return the names of the evaluation metrics for which a higher value is better."""
    names = [f"eval/{name}/accuracy" for name in topology.data.eval]
    several = [(name, each.samples) for name, each in topology.data.eval.items() if each.samples > 1]
    return names + [f"eval/{name}/{kind}@{samples}" for name, samples in several for kind in ("avg", "pass")]


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
        limit, longest = service.max_tokens_per_micro_batch, prompt + new
        if topology.workflow is not None:
            longest, said = topology.workflow.max_tokens, f"{topology.workflow.max_tokens} tokens (workflow.max_tokens)"
        if longest > limit:
            message = f"{limit} is less than one sample: {said}; use at least {longest}"
            yield ("services", key, "max_tokens_per_micro_batch"), message


def _services(topology: Topology) -> Found:
    services = topology.services
    trainer = services.policy_trainer
    counts = [(key, "gpus", service.gpus, service.parallel.model_ranks) for key, service in services.placed.items()]
    counts.append(("policy-trainer", "workers", trainer.workers or 0, trainer.parallel.model_ranks))
    for key, name, count, ranks in counts:
        if count % ranks:
            enough = math.ceil(count / ranks) * ranks
            yield ("services", key, name), f"{count} is not a multiple of tp*pp*cp = {ranks}; use {enough}"
    if trainer.workers is not None and trainer.gpus:
        message = f"{trainer.workers} has no effect with {trainer.gpus} gpus: one rank runs on each; remove it"
        yield ("services", "policy-trainer", "workers"), message
    store = services.batch_store
    if store.spill is None and store.spill_limit is not None:
        message = f"{store.spill_limit} bytes have no effect without spill; remove it, or name a folder as spill"
        yield ("services", "batch-store", "spill_limit"), message
    if store.spill is not None and store.spill_limit is None:
        yield ("services", "batch-store", "spill"), f"{store.spill} has no limit; set spill_limit, such as 500GiB"
    checkpoint = topology.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        message = f"{checkpoint.keep_every} is not a multiple of every ({checkpoint.every}), so some would not exist"
        yield ("checkpoint", "keep_every"), f"{message}; use a multiple"


def _placement(topology: Topology) -> Found:
    hosts, services, placement = topology.placement.hosts, topology.services, topology.placement
    for key, service in services.placed.items():
        for name in service.host or ():
            if name not in hosts:
                near = difflib.get_close_matches(name, list(hosts), n=1) or sorted(hosts)
                remedy = f"use {' or '.join(map(repr, near))}" if near else "add it there"
                yield ("services", key, "host"), f"no host {name!r} in placement.hosts; {remedy}"
        if service.host is not None and len(set(service.host)) < max(len(service.host), 1):
            yield ("services", key, "host"), f"{list(service.host)}: name a host, or several different ones"
    needed = _gpus_needed(topology)
    for name, host in hosts.items():
        if needed[name] > host.gpus:
            message = f"{host.gpus} GPUs, but the services on host {name} use {needed[name]}; move one or colocate"
            yield ("placement", "hosts", name, "gpus"), message
    others = [name for name in topology.store_hosts()[1:] if name in hosts]
    if placement.engine == "ray" and not others:
        yield (
            ("placement", "engine"),
            "ray has no effect without other hosts; name them in placement.hosts or use local",
        )
    named = {host for service in services.placed.values() for host in service.host or ()}
    reached = topology.transport.listen is not None or placement.engine == "ray"
    if others and not reached and named <= hosts.keys():
        message = f"none, but {', '.join(map(str, others))} must reach this machine; give its address"
        yield ("transport", "listen"), message
    away = sorted({str(spec.host) for spec in topology.away_plan() if spec.service == "rollout"})
    if away and services.rollout.weights == "ipc":
        message = f"ipc reaches rollouts on the trainer's GPUs only, not on {', '.join(away)}"
        yield ("services", "rollout", "weights"), f"{message}; use shards or nccl"


def _gpus_needed(topology: Topology) -> Counter[str | None]:
    """Return the number of GPUs that the services on each host use. Colocated services share them."""
    separate: Counter[str | None] = Counter()
    together: Counter[str | None] = Counter()
    for key, service in topology.services.placed.items():
        each = service.gpus if key == "rollout" else min(service.gpus, 1)
        hosts = [spec.host for spec in topology.services_plan() if spec.service == DEVICE_SERVICE[key]]
        mine = Counter({host: each * hosts.count(host) for host in hosts})
        if key in topology.placement.colocate:
            together |= mine
        else:
            separate += mine
    return separate + together


def _partial(topology: Topology) -> Found:
    rollout = topology.services.rollout
    if rollout.partial_s is None:
        return
    path, value = ("services", "rollout", "partial_s"), f"{rollout.partial_s:g}"
    if rollout.engine == "openai":
        yield path, f"{value} has no effect with engine openai, which starts samples over; remove it"
    if rollout.engine == "vllm" and topology.sampling.stop:
        yield path, f"{value}: vllm would miss a stop text (sampling.stop) across the cut; remove one of them"
    if topology.workflow is not None:
        yield path, f"{value} has no effect with a workflow, whose samples start over; remove it"
    if topology.algorithm.loss.name == "cross_entropy":
        yield path, f"{value} has no effect with loss cross_entropy, which does not sample; remove it"
    if topology.run.deterministic:
        yield path, f"{value}: the moment of a kill would affect the results; run.deterministic needs it left out"


def _transport(topology: Topology) -> Found:
    """Check the endpoints for other hosts. With Ray, the launcher fills in the address of its node."""
    transport = topology.transport
    if topology.policy.distribute and not topology.placement.hosts:
        yield ("policy", "distribute"), "true has no effect without other hosts (placement.hosts); leave it out"
    ports = ("scheduler_port", "supervisor_port", "monitor_port")
    if transport.listen is None and topology.placement.engine == "local":
        if not transport.encrypt_bulk:
            message = "false: without transport.listen, nothing is sent to other hosts; leave it out"
            yield ("transport", "encrypt_bulk"), message
        for name in ports:
            if getattr(transport, name) != type(transport).model_fields[name].default:
                yield ("transport", name), "without transport.listen, no process listens on tcp; leave it out"
        return
    if transport.listen == "0.0.0.0":  # noqa: S104  # refused, not bound
        yield ("transport", "listen"), "0.0.0.0: other hosts are told this address; give the one that they reach"
    taken: dict[int, str] = {}
    for name in ports:
        port = getattr(transport, name)
        if port in taken:
            yield ("transport", name), f"{port} is transport.{taken[port]} too; choose another"
        taken[port] = name


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
    try:
        weights = weight_bytes(topology.policy.model, topology.policy.dtype)
    except (OSError, ValueError) as error:
        yield ("policy", "model"), f"{error}; save the model again"
        return
    # Without max_prompt_tokens this is a lower bound: the longest prompt is not known until the data set has been read.
    needed = worst_case_bytes(topology, topology.data.train.max_prompt_tokens or 0, weights)
    limit = limit_bytes(topology)
    if limit < needed:
        message = (
            f"{limit} bytes ({format_size(limit)}) cannot hold {held_tasks(topology)} tasks of "
            f"{topology.algorithm.group_size} samples and {weight_versions(topology)} weight versions of "
            f"{format_size(weights)} at a time; set at least {needed} ({format_size(needed)}) or lower staleness, "
            "tasks_per_step, group_size or max_new_tokens"
        )
        yield ("services", "batch-store", "memory"), message
