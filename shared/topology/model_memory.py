"""Computes the memory that a topology's model needs on each host and GPU: parameters, gradients and optimizer state.

Everything else (activations, an engine's cache, the libraries) needs additional memory, so a run that this arithmetic
refuses cannot fit. The module is pure. `elements` is the number of parameters (`model_files.parameter_count`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from shared.topology.capacity import DTYPE_BYTES
from shared.topology.schema import Topology
from shared.topology.services import DEVICE_SERVICE

Key = tuple[str, int]
"""Service and instance."""
_FLOAT, _MOMENTS = 4, 8
"""Bytes per parameter of a float32 copy, and of the two moments of AdamW."""


class Part(StrEnum):
    """The parts of a model during training."""

    WEIGHTS = "weights"
    MASTERS = "masters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


_LAST_A_STEP: Mapping[str, frozenset[Part]] = MappingProxyType(
    {"torch": frozenset({Part.GRADIENTS}), "megatron": frozenset()}
)
"""The parts that each backend allocates in a step and frees at the end of the step."""


class Place(NamedTuple):
    """The memory of a host, or of one of its GPUs."""

    host: str | None
    gpu: str  # as CUDA_VISIBLE_DEVICES names it; "" is the host's own memory


def training_parts(topology: Topology) -> dict[Part, float]:
    """Return the maximum number of bytes per model parameter on each rank of the trainer, by part.

    With backend torch, a single rank holds everything, with float32 masters beside 16-bit weights. Several ranks hold
    equal pieces in float32 (FSDP2). With megatron, ranks hold the weights and float32 gradients of their tensor- and
    pipeline-parallel piece, and split the masters and the optimizer state further. An evaluation has no optimizer state
    and, with backend torch, no gradients.
    """
    parts = _parts(topology)
    if topology.run.evaluate:
        never = {Part.OPTIMIZER, *_LAST_A_STEP[topology.services.policy_trainer.backend]}
        parts = {part: nbytes for part, nbytes in parts.items() if part not in never}
    return parts


def _parts(topology: Topology) -> dict[Part, float]:
    trainer, width = topology.services.policy_trainer, DTYPE_BYTES[topology.policy.dtype]
    masters = _FLOAT if width < _FLOAT else 0
    ranks = trainer.world_size
    if trainer.backend == "megatron":
        pieces = trainer.parallel.tp * trainer.parallel.pp
        return {
            Part.WEIGHTS: width / pieces,
            Part.MASTERS: masters / ranks,
            Part.GRADIENTS: _FLOAT / pieces,
            Part.OPTIMIZER: _MOMENTS / ranks,
        }
    if ranks > 1:
        return {Part.WEIGHTS: _FLOAT / ranks, Part.GRADIENTS: _FLOAT / ranks, Part.OPTIMIZER: _MOMENTS / ranks}
    return {Part.WEIGHTS: width, Part.MASTERS: masters, Part.GRADIENTS: _FLOAT, Part.OPTIMIZER: _MOMENTS}


def per_process(topology: Topology, elements: int) -> dict[Key, int]:
    """Return the number of bytes that the model takes up in each process that computes with it.

    An embedded engine on a CPU computes with the version in its host's store and has no weights of its own, except in
    deterministic mode, in which it copies the version.
    """
    width = DTYPE_BYTES[topology.policy.dtype]
    rollout, reference = topology.services.rollout, topology.services.reference
    embedded = rollout.engine == "transformers" and rollout.device == "cpu" and not topology.run.deterministic
    holds_none = embedded or rollout.engine == "openai"
    pieces = {"reference": reference.parallel.tp * reference.parallel.pp if reference is not None else 1, "rollout": 1}
    found: dict[Key, int] = {}
    for spec in topology.services_plan():
        if spec.service == DEVICE_SERVICE["policy-trainer"]:
            found[spec.service, spec.instance] = math.ceil(elements * sum(training_parts(topology).values()))
        elif spec.service in pieces:
            held = 0 if spec.service == "rollout" and holds_none else width * elements
            found[spec.service, spec.instance] = math.ceil(held / pieces[spec.service])
    return found


def per_place(topology: Topology, elements: int, gpus: Mapping[Key, str]) -> dict[Place, int]:
    """Return the number of bytes that the model takes up on every host and GPU. `gpus` holds the CUDA_VISIBLE_DEVICES
    of each process.

    Colocated services take turns, so only the largest of them counts. On GPUs, the trainer's parts wait in host memory
    during the other services' turns, except for the gradients of backend torch, which exist only during a step.
    """
    gone = _LAST_A_STEP[topology.services.policy_trainer.backend]
    waiting = math.ceil(elements * sum(n for part, n in training_parts(topology).items() if part not in gone))
    hosts = {(spec.service, spec.instance): spec.host for spec in topology.services_plan()}
    together = {DEVICE_SERVICE[name] for name in topology.placement.colocate}
    apart: dict[Place, int] = {}
    turns: dict[Place, int] = {}
    for key, nbytes in per_process(topology, elements).items():
        names = [each for each in gpus.get(key, "").split(",") if each]
        for name in names or [""]:
            place, share = Place(hosts[key], name), math.ceil(nbytes / max(len(names), 1))
            if key[0] in together:
                turns[place] = max(turns.get(place, 0), share)
            else:
                apart[place] = apart.get(place, 0) + share
        if names and key[0] in together and key[0] == DEVICE_SERVICE["policy-trainer"]:
            own = Place(hosts[key], "")
            apart[own] = apart.get(own, 0) + waiting
    return {place: apart.get(place, 0) + turns.get(place, 0) for place in apart | turns}
