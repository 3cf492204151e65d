"""Finds the faults in a well-formed topology: contradicting keys, missing files, and limits too small for the run.

It neither changes the topology nor inspects anything that is running (ports, folders in use). A check yields
`(path, message)`. The message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
from pathlib import Path as FilePath

from shared.data.files import matching_files, split_parameters
from shared.names import is_text, shown
from shared.topology import algorithm_checks, hub, monitor, service_checks
from shared.topology.capacity import held_tasks, limit_bytes, weight_bytes, weight_versions, worst_case_bytes
from shared.topology.document import Found, Path
from shared.topology.fields import format_size
from shared.topology.model_files import read_config
from shared.topology.schema import Topology


def check(topology: Topology) -> Found:
    """Yield every contradiction, missing file and insufficient limit in `topology`."""
    yield from _files(topology)
    yield from algorithm_checks.check(topology)
    yield from _retry(topology)
    yield from _evaluation(topology)
    yield from _lengths(topology)
    yield from service_checks.check(topology)
    yield from monitor.check(topology.services.monitor)
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
    sources |= {("data", "eval", name, "source"): evaluation.source for name, evaluation in topology.data.eval.items()}
    for where, source in sources.items():
        scheme, _, rest = source.partition(":")
        file, _ = split_parameters(rest)
        if scheme == "hub" or (scheme in ("jsonl", "parquet") and not any(map(FilePath.is_file, matching_files(file)))):
            yield where, _absent(hub.source_name(source), f"no file {file}", "put it there")
        for match in matching_files(file):
            if not is_text(match):
                yield where, f"{shown(match)}: its name is not UTF-8; rename it"
        if scheme == "datasets" and not FilePath(file).is_dir():
            yield where, _absent(None, f"no folder {file}", "put it there")


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
    if topology.run.evaluate and not topology.data.eval:
        yield ("run", "evaluate"), "true, but data.eval has no evaluation set; add one"
    for name, evaluation in topology.data.eval.items():
        if name == "train":
            yield ("data", "eval", name), "'train' is the name of the training split; use another name"
        if evaluation.temperature == 0 and evaluation.samples > 1:
            message = f"{evaluation.samples} samples at temperature 0 are all the same; use 1, or a temperature above 0"
            yield ("data", "eval", name, "samples"), message

    metric, metrics = topology.checkpoint.keep_best, _evaluated_metrics(topology)
    if metric is not None and metric not in metrics:
        near = difflib.get_close_matches(metric, metrics, n=1, cutoff=0.0)
        remedy = f"use {near[0]}" if near else "there is no evaluation set in data.eval; add one"
        yield ("checkpoint", "keep_best"), f"no evaluation produces {metric!r}; {remedy}"


def _evaluated_metrics(topology: Topology) -> list[str]:
    """Return the names of the evaluation metrics for which a higher value is better."""
    names = [f"eval/{name}/accuracy" for name in topology.data.eval]
    several = [(name, evaluation.samples) for name, evaluation in topology.data.eval.items() if evaluation.samples > 1]
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
