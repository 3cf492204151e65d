"""Computes the memory that a topology's model needs in each process: parameters, gradients and optimizer state.

Everything else (activations, an engine's cache, the libraries) needs additional memory. `memory_plan` adds copies that
exist for a time, and sums up what is on each host and GPU. The module is pure. `elements` is the number of parameters
(`model_files.parameter_count`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from shared.topology.capacity import DTYPE_BYTES
from shared.topology.schema import Topology
from shared.topology.services import DEVICE_SERVICE

Key = tuple[str, int]
"""Service and instance."""
SHARE_WITH_GRADIENTS = 0.5
"""Maximum share of a rank's memory that the parts of the model take up if the rank keeps whole gradients. The rest is
for activations and weights that are gathered temporarily."""
_FLOAT, _MOMENTS = 4, 8
"""Bytes per parameter of a float32 copy, and of the two moments of AdamW."""


class TrainingPart(StrEnum):
    """The parts of a model during training."""

    WEIGHTS = "weights"
    MASTERS = "masters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


LAST_A_STEP: Mapping[str, frozenset[TrainingPart]] = MappingProxyType(
    {"torch": frozenset({TrainingPart.GRADIENTS}), "megatron": frozenset()}
)
"""The parts that each backend allocates in a step and frees at the end of the step."""


def training_parts(topology: Topology) -> dict[TrainingPart, float]:
    """Return the maximum number of bytes per model parameter on each rank of the trainer, by part.

    With backend torch, a single rank holds everything, with float32 masters beside 16-bit weights. Several ranks hold
    equal pieces in float32 (FSDP2). With megatron, ranks hold the weights and float32 gradients of their tensor- and
    pipeline-parallel piece, and split the masters and the optimizer state further. An evaluation has no optimizer state
    and, with backend torch, no gradients.
    """
    parts = _parts(topology)
    if topology.run.evaluate:
        never = {TrainingPart.OPTIMIZER, *LAST_A_STEP[topology.services.policy_trainer.backend]}
        parts = {part: nbytes for part, nbytes in parts.items() if part not in never}
    return parts


def _parts(topology: Topology) -> dict[TrainingPart, float]:
    trainer, width = topology.services.policy_trainer, DTYPE_BYTES[topology.policy.dtype]
    masters = _FLOAT if width < _FLOAT else 0
    ranks = trainer.world_size
    if trainer.backend == "megatron":
        pieces = trainer.parallel.tp * trainer.parallel.pp
        return {
            TrainingPart.WEIGHTS: width / pieces,
            TrainingPart.MASTERS: masters / ranks,
            TrainingPart.GRADIENTS: _FLOAT / pieces,
            TrainingPart.OPTIMIZER: _MOMENTS / ranks,
        }
    if ranks > 1:
        return {
            TrainingPart.WEIGHTS: _FLOAT / ranks,
            TrainingPart.GRADIENTS: _FLOAT / ranks,
            TrainingPart.OPTIMIZER: _MOMENTS / ranks,
        }
    return {
        TrainingPart.WEIGHTS: width,
        TrainingPart.MASTERS: masters,
        TrainingPart.GRADIENTS: _FLOAT,
        TrainingPart.OPTIMIZER: _MOMENTS,
    }


def saved_bytes(topology: Topology) -> int:
    """Return the number of bytes per model parameter of the state that rank 0 gathers for a checkpoint: the weights,
    the masters of 16-bit weights, and the moments.
    """
    width = DTYPE_BYTES[topology.policy.dtype]
    return width + (_FLOAT if width < _FLOAT else 0) + _MOMENTS


def holds_none(topology: Topology) -> bool:
    """Return whether the engine has no weights of its own: it computes with the version in its host's store, or on
    another server."""
    rollout = topology.services.rollout
    embedded = rollout.engine == "transformers" and rollout.device == "cpu" and not topology.run.deterministic
    return embedded or rollout.engine == "openai"


def keeps_whole_gradients(elements: int, ranks: int, memory_bytes: int) -> bool:
    """Return whether each rank of backend torch keeps the whole float32 gradient until the last micro-batch.

    The ranks then add up their gradients once per batch instead of once per micro-batch. The whole gradient is not part
    of `training_parts`, because it is kept only where the memory of a rank, `memory_bytes`, allows it.
    """
    pieces = (_FLOAT + _FLOAT + _MOMENTS) / ranks
    return elements * (pieces + _FLOAT) <= SHARE_WITH_GRADIENTS * memory_bytes


def per_process(topology: Topology, elements: int) -> dict[Key, int]:
    """Return the number of bytes that the model takes up in each process that computes with it.

    An embedded engine on a CPU computes with the version in its host's store and has no weights of its own, except in
    deterministic mode, in which it copies the version.
    """
    width = DTYPE_BYTES[topology.policy.dtype]
    reference = topology.services.reference
    pieces = {"reference": reference.parallel.tp * reference.parallel.pp if reference is not None else 1, "rollout": 1}
    found: dict[Key, int] = {}
    for spec in topology.services_plan():
        if spec.service == DEVICE_SERVICE["policy-trainer"]:
            found[spec.service, spec.instance] = math.ceil(elements * sum(training_parts(topology).values()))
        elif spec.service in pieces:
            held = 0 if spec.service == "rollout" and holds_none(topology) else width * elements
            found[spec.service, spec.instance] = math.ceil(held / pieces[spec.service])
    return found
