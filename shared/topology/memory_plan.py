"""Plans the memory of a run: what each process holds on each host and GPU, and in which phase of the run.

Only the model is counted, with the copies of it that exist for a time. Activations, an engine's cache, the libraries
and the shards in the store need additional memory, so a run whose plan does not fit in its steps or its checkpoints
cannot fit. The module is pure. `elements` is the number of parameters (`model_files.parameter_count`), and `gpus` holds
the CUDA_VISIBLE_DEVICES of each process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from shared.topology.capacity import DTYPE_BYTES
from shared.topology.model_memory import LAST_A_STEP, Key, holds_none, per_process, saved_bytes, training_parts
from shared.topology.schema import Topology
from shared.topology.services import DEVICE_SERVICE

MOST_GPUS = 1024
"""Maximum number of GPUs that `gpus_that_fit` considers."""
_LOGIT_BYTES = 16
"""Bytes per logit of a pass: the logits, their scaled copy, the log-probs and their gradient in float32 (measured)."""
_VLLM_SHARE = 0.92
"""Default of vLLM's `gpu_memory_utilization`."""


class MemoryPlace(NamedTuple):
    """The memory of a host, or of one of its GPUs."""

    host: str | None
    gpu: str  # as CUDA_VISIBLE_DEVICES names it; "" is the host's own memory


class Phase(StrEnum):
    """A time in a run at which processes hold the same things."""

    START = "start"
    STEPS = "steps"
    CHECKPOINTS = "checkpoints"


ALWAYS = frozenset(Phase)
_STARTED = frozenset({Phase.STEPS, Phase.CHECKPOINTS})


class Use(NamedTuple):
    """Memory that a process holds in some phases. Uses that take turns are never there at the same time, unless they
    belong to the same service."""

    place: MemoryPlace
    key: Key
    what: str
    nbytes: int
    phases: frozenset[Phase]
    turns: bool = False


class Peak(NamedTuple):
    """The phase in which the processes need the most memory in one place, and how much they need."""

    nbytes: int
    phase: Phase


def uses(topology: Topology, elements: int, gpus: Mapping[Key, str], vocabulary: int = 0) -> list[Use]:
    """Return everything that the run's processes hold of the model. `vocabulary` is the number of its tokens."""
    hosts = {(spec.service, spec.instance): spec.host for spec in topology.services_plan()}
    found: list[Use] = []
    for key, nbytes in per_process(topology, elements).items():
        names = [each for each in gpus.get(key, "").split(",") if each]
        turns = any(DEVICE_SERVICE[name] == key[0] for name in topology.placement.colocate)
        for place in [MemoryPlace(hosts[key], name) for name in names or [""]]:
            if key[0] == DEVICE_SERVICE["policy-trainer"]:
                found += _trained(topology, elements, place, key, turns=turns)
            elif nbytes:
                found.append(Use(place, key, "weights", math.ceil(nbytes / max(len(names), 1)), ALWAYS, turns))
        found += _copies(topology, elements, MemoryPlace(hosts[key], ""), key, on_gpu=bool(names), turns=turns)
        if nbytes := logit_bytes(topology, vocabulary, key[0]):
            for place in [MemoryPlace(hosts[key], name) for name in names or [""]]:
                found.append(Use(place, key, "logits", nbytes, frozenset({Phase.STEPS}), turns))
    return found


def logit_bytes(topology: Topology, vocabulary: int, service: str) -> int:
    """Return the bytes of all logits of a micro-batch, if `service` computes them at once (`policy.passes.head`)."""
    passes = topology.policy.passes
    scorers = {DEVICE_SERVICE[name]: scorer for name, scorer in topology.services.scorers.items()}
    if service not in scorers or passes is None or passes.head == "blocks" or scorers[service].backend != "torch":
        return 0
    return scorers[service].max_tokens_per_micro_batch * vocabulary * _LOGIT_BYTES


def peak(some: Sequence[Use], phases: frozenset[Phase] = ALWAYS) -> Peak:
    """Return the peak of `some` uses, which are all in the same place, in `phases`. Colocated services take turns, so
    only the largest of them counts.
    """
    sums: dict[Phase, int] = {}
    for phase in Phase:
        apart, turns = 0, dict[str, int]()
        for use in some:
            if phase not in use.phases:
                continue
            if use.turns:
                turns[use.key[0]] = turns.get(use.key[0], 0) + use.nbytes
            else:
                apart += use.nbytes
        if phase in phases:
            sums[phase] = apart + max(turns.values(), default=0)
    return max((Peak(nbytes, phase) for phase, nbytes in sums.items()), key=lambda each: each.nbytes)


def by_place(found: Sequence[Use]) -> dict[MemoryPlace, list[Use]]:
    """Return the uses in each place: hosts first, then their GPUs."""
    places = sorted({use.place for use in found}, key=lambda at: (at.gpu != "", at.host or "", len(at.gpu), at.gpu))
    return {place: [use for use in found if use.place == place] for place in places}


def gpus_that_fit(topology: Topology, elements: int, limit_bytes: int) -> int | None:
    """Return the smallest `services.policy-trainer.gpus` with which each rank's part of the training state fits in
    `limit_bytes`, or None if no number up to MOST_GPUS does.
    """
    services = topology.services
    step = services.policy_trainer.parallel.model_ranks
    for count in range(step, MOST_GPUS + 1, step):
        trainer = services.policy_trainer.model_copy(update={"gpus": count})
        changed = topology.model_copy(update={"services": services.model_copy(update={"policy_trainer": trainer})})
        if sum(math.ceil(elements * share) for share in training_parts(changed).values()) <= limit_bytes:
            return count
    return None


def vllm_share(topology: Topology) -> float | None:
    """Return the share of a GPU that vLLM takes for its weights and its cache, or None if no engine does so."""
    rollout = topology.services.rollout
    if rollout.engine != "vllm" or not rollout.gpus or "kv_cache_memory_bytes" in rollout.engine_args:
        return None
    return float(rollout.engine_args.get("gpu_memory_utilization", _VLLM_SHARE))


def _trained(topology: Topology, elements: int, place: MemoryPlace, key: Key, *, turns: bool) -> Iterator[Use]:
    """Yield the training state of a rank. What a backend allocates anew in every step is absent outside of steps."""
    gone = LAST_A_STEP[topology.services.policy_trainer.backend]
    for part, share in training_parts(topology).items():
        phases = frozenset({Phase.STEPS}) if part in gone else _STARTED if part == "optimizer" else ALWAYS
        if share:
            yield Use(place, key, str(part), math.ceil(elements * share), phases, turns)


def _copies(
    topology: Topology, elements: int, host: MemoryPlace, key: Key, *, on_gpu: bool, turns: bool
) -> Iterator[Use]:
    """Yield the copies that a process has in the memory of its host, besides what it computes with."""
    whole = elements * DTYPE_BYTES[topology.policy.dtype]
    trainer, rollout = topology.services.policy_trainer, topology.services.rollout
    reference = topology.services.reference
    if key[0] == "rollout" and (on_gpu or rollout.engine == "vllm" or holds_none(topology)):
        yield Use(host, key, "loading", whole, frozenset({Phase.START}))
    if key[0] == "reference" and on_gpu and reference is not None and reference.backend == "torch":
        yield Use(host, key, "loading", whole, frozenset({Phase.START}))
    if key[0] != DEVICE_SERVICE["policy-trainer"]:
        return
    if on_gpu and turns:
        gone = LAST_A_STEP[trainer.backend]
        parts = [share for part, share in training_parts(topology).items() if part not in gone]
        yield Use(host, key, "waiting for its turn", math.ceil(elements * sum(parts)), _STARTED)
    if key[1]:
        return
    yield Use(host, key, "loading", whole, frozenset({Phase.START}))
    if on_gpu or trainer.world_size > 1 or trainer.backend == "megatron":
        # The page-locked copy of a single rank's weights is kept; gathered weights are not.
        kept = on_gpu and trainer.world_size == 1
        yield Use(host, key, "publishing", whole, _STARTED if kept else frozenset({Phase.STEPS}))
    if topology.run.evaluate:
        return
    if topology.run.deterministic and topology.staleness:
        yield Use(host, key, "earlier versions", whole * (topology.staleness + 1), _STARTED)
    yield Use(host, key, "saving", elements * saved_bytes(topology), frozenset({Phase.CHECKPOINTS}))
