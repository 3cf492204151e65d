"""What a well-formed topology can still get wrong: contradicting keys, missing files, limits that cannot hold
the run. It never changes the topology and never looks at what runs (ports, folders in use).

A check yields `(path, message)`; a message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path as FilePath

from shared.topology.algorithm import GROUP_ADVANTAGES
from shared.topology.capacity import WEIGHT_VERSIONS, weight_bytes, worst_case_bytes
from shared.topology.fields import format_size
from shared.topology.problem import Path
from shared.topology.schema import Topology

Found = Iterator[tuple[Path, str]]


def check(topology: Topology) -> Found:
    """Every contradiction, missing file and limit too small of `topology`."""
    yield from _files(topology)
    yield from _algorithm(topology)
    yield from _loss(topology)
    yield from _evaluation(topology)
    yield from _lengths(topology)
    yield from _services(topology)
    yield from _placement(topology)
    yield from _deterministic(topology)
    yield from _memory(topology)


def _files(topology: Topology) -> Found:
    model = FilePath(topology.policy.model)
    path = ("policy", "model")
    if not model.is_absolute():
        yield (
            path,
            f"{model} is neither a folder nor in the local Hugging Face cache (nothing is downloaded)",
        )
    elif not model.is_dir():
        yield path, f"no folder {model}, relative paths start at the topology's folder; put the model there"
    elif not (model / "config.json").is_file():
        yield (
            path,
            f"{model} has no config.json, a model's folder has one; save the model with save_pretrained",
        )
    elif not any(model.glob("*.safetensors")):
        yield (
            path,
            f"{model} has no *.safetensors, the only weight format read; save the model as safetensors",
        )
    sources: dict[Path, str] = {("data", "train", "source"): topology.data.train.source}
    sources |= {("data", "eval", name, "source"): each.source for name, each in topology.data.eval.items()}
    for where, source in sources.items():
        scheme, _, file = source.partition(":")
        if scheme == "jsonl" and not FilePath(file).is_file():
            yield where, f"no file {file}, relative paths start at the topology's folder; put it there"


def _algorithm(topology: Topology) -> Found:
    algorithm = topology.algorithm
    tasks, mini, block = (
        algorithm.tasks_per_step,
        algorithm.mini_batch_tasks,
        topology.services.rollout.block_tasks,
    )
    if tasks % mini:
        yield (
            ("algorithm", "mini_batch_tasks"),
            f"{mini} does not divide tasks_per_step ({tasks}), use a divisor",
        )
    if tasks % block:
        message = f"{block} does not divide algorithm.tasks_per_step ({tasks}), use a divisor or leave it out"
        yield ("services", "rollout", "block_tasks"), message
    if algorithm.group_size == 1 and algorithm.advantage.name in GROUP_ADVANTAGES:
        message = f"1 leaves advantage {algorithm.advantage.name} nothing to compare, at least 2"
        yield ("algorithm", "group_size"), message
    for index, beta in enumerate(topology.optimizer.betas):
        if not 0 <= beta < 1:
            yield ("optimizer", "betas", index), f"{beta} is out of range, from 0 to below 1, as 0.9"


def _loss(topology: Topology) -> Found:
    loss, kl = topology.algorithm.loss, topology.algorithm.kl
    low, high = loss.clip
    if not 0 < low < 1:
        yield ("algorithm", "loss", "clip", 0), f"{low} is out of range, above 0 and below 1, as 0.2"
    if high <= 0:
        yield ("algorithm", "loss", "clip", 1), f"{high} is out of range, above 0, as 0.2"
    if loss.anchor == "rollout" and loss.tis_cap is not None:
        message = f"{loss.tis_cap} has no effect with anchor rollout; remove it, or set anchor proximal"
        yield ("algorithm", "loss", "tis_cap"), message
    if loss.name == "gspo" and loss.aggregation != "seq_mean_token_mean":
        message = f"{loss.aggregation} does not fit loss gspo, a ratio per sequence: use seq_mean_token_mean"
        yield ("algorithm", "loss", "aggregation"), message
    if kl is not None and kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield ("algorithm", "kl", "estimator"), "k1 as a loss term has zero expected gradient, use k3 or k2"
    if not topology.needs_reference and topology.services.reference is not None:
        coef = "there is no algorithm.kl" if kl is None else "algorithm.kl.coef is 0"
        message = f"has no effect, {coef} and no reference is started; remove it (null) or set a coef above 0"
        yield ("services", "reference"), message


def _evaluation(topology: Topology) -> Found:
    for name, each in topology.data.eval.items():
        if name == "train":
            yield ("data", "eval", name), "'train' is the name of the training split, use another"
        if each.temperature == 0 and each.samples > 1:
            message = f"{each.samples} samples at temperature 0 are all the same; use 1, or a temperature above 0"
            yield ("data", "eval", name, "samples"), message


def _lengths(topology: Topology) -> Found:
    """The longest sample (or, without max_prompt_tokens, completion) fits the positions and a micro-batch."""
    prompt, new = topology.data.train.max_prompt_tokens or 0, topology.sampling.max_new_tokens
    said = f"{prompt} prompt tokens (data.train.max_prompt_tokens) and {new} new" if prompt else f"{new} new tokens"
    positions = _positions(topology.policy.model)
    if positions is not None and prompt + new > positions:
        message = f"{said} exceed the model's {positions} positions; lower one of them"
        yield ("sampling", "max_new_tokens"), message
    for key, service in (
        ("policy-trainer", topology.services.policy_trainer),
        ("reference", topology.services.reference),
    ):
        if service is not None and prompt + new > service.max_tokens_per_micro_batch:
            limit = service.max_tokens_per_micro_batch
            message = f"{limit} is less than one sample: {said}; use at least {prompt + new}"
            yield ("services", key, "max_tokens_per_micro_batch"), message


def _positions(model: str) -> int | None:
    try:
        config = json.loads((FilePath(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whether the file is there is _files' to say, its content the model library's
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return positions if isinstance(positions, int) else None


def _services(topology: Topology) -> Found:
    services = topology.services
    for key, service in (
        ("policy-trainer", services.policy_trainer),
        ("reference", services.reference),
        ("rollout", services.rollout),
    ):
        if service is None:
            continue
        ranks = service.parallel.model_ranks
        if service.gpus % ranks:
            enough = math.ceil(service.gpus / ranks) * ranks
            message = f"{service.gpus} is no multiple of tp*pp*cp = {ranks}, use {enough}"
            yield ("services", key, "gpus"), message
    store = services.batch_store
    if store.spill is None and store.spill_limit is not None:
        message = f"{store.spill_limit} bytes have no effect without spill; remove it, or name a folder as spill"
        yield ("services", "batch-store", "spill_limit"), message
    if store.spill is not None and store.spill_limit is None:
        yield ("services", "batch-store", "spill"), f"{store.spill} has no limit, set spill_limit, as 500GiB"
    checkpoint = topology.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        message = f"{checkpoint.keep_every} is no multiple of every ({checkpoint.every}), so some would never exist"
        yield ("checkpoint", "keep_every"), f"{message}; use a multiple"


def _placement(topology: Topology) -> Found:
    hosts, shared_names = topology.placement.hosts, topology.placement.colocate
    services = topology.services
    gpu_services = {"policy-trainer": services.policy_trainer, "reference": services.reference}
    separate = dict.fromkeys(hosts, 0)
    together = dict.fromkeys(hosts, 0)
    for key, service in {**gpu_services, "rollout": services.rollout}.items():
        if service is None or service.host is None:
            continue
        if service.host not in hosts:
            near = difflib.get_close_matches(service.host, list(hosts), n=1) or sorted(hosts)
            remedy = f"use {' or '.join(map(repr, near))}" if near else "add it there"
            yield ("services", key, "host"), f"no host {service.host!r} in placement.hosts, {remedy}"
            continue
        needed = service.gpus * (services.rollout.instances if key == "rollout" else 1)
        if key in shared_names:
            together[service.host] = max(together[service.host], needed)
        else:
            separate[service.host] += needed
    for name, host in hosts.items():
        needed = separate[name] + together[name]
        if needed > host.gpus:
            message = f"{host.gpus} GPUs, but the services on host {name} use {needed}; move one or colocate"
            yield ("placement", "hosts", name, "gpus"), message
    for index, name in enumerate(shared_names):
        if name not in ("policy-trainer", "reference", "rollout"):
            message = f"{name!r} is no service with GPUs, use policy-trainer, reference or rollout"
            yield ("placement", "colocate", index), message


def _deterministic(topology: Topology) -> Found:
    if not topology.run.deterministic:
        return
    if topology.services.rollout.engine != "transformers":
        message = f"{topology.services.rollout.engine} is not batch-invariant, run.deterministic needs transformers"
        yield ("services", "rollout", "engine"), message
    if topology.consume != "order":
        yield ("consume",), f"{topology.consume} depends on timing, run.deterministic needs order"
    if topology.algorithm.filter_zero_variance is not None:
        yield (
            ("algorithm", "filter_zero_variance"),
            "refills depend on timing, run.deterministic needs it left out",
        )


def _memory(topology: Topology) -> Found:
    try:
        weights = weight_bytes(topology.policy.model, topology.policy.dtype)
    except (OSError, ValueError) as error:
        yield ("policy", "model"), f"{error}; save the model again"
        return
    # Without max_prompt_tokens this is a floor: the longest prompt is known once the data set is read.
    needed = worst_case_bytes(topology, topology.data.train.max_prompt_tokens or 0, weights)
    limit = topology.services.batch_store.memory
    if limit < needed:
        live = (topology.staleness + 1) * topology.algorithm.tasks_per_step
        message = (
            f"{limit} bytes ({format_size(limit)}) cannot hold {live} live tasks of "
            f"{topology.algorithm.group_size} samples and {WEIGHT_VERSIONS} weight versions of "
            f"{format_size(weights)}; set at least {needed} ({format_size(needed)}) or lower staleness, "
            "tasks_per_step, group_size or max_new_tokens"
        )
        yield ("services", "batch-store", "memory"), message
