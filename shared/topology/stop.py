"""How long a run that is told to stop may take to save where it stands: one limit for launcher, guard and services."""

from __future__ import annotations

from shared.topology.capacity import weight_bytes
from shared.topology.schema import Topology

STEP_S = 60.0
"""Seconds for what does not grow with the checkpoint: the step that is open, and calls between services."""
BYTES_PER_S = 32 << 20
"""A slow disk: a checkpoint is written, synced and read back at this rate at least."""
_MOMENTS = 2
"""Float32 numbers that the optimizer keeps of each parameter, beside the parameter itself (AdamW)."""


def checkpoint_bytes(topology: Topology) -> int:
    """Bytes of one checkpoint, about: float32 weights, the optimizer's moments, in deterministic mode earlier versions.

    0 when the model cannot be measured (the check of the topology says so).
    """
    try:
        weights = weight_bytes(topology.policy.model, "float32")
    except (OSError, ValueError):
        return 0
    earlier = topology.staleness if topology.run.deterministic else 0
    return weights * (1 + _MOMENTS + earlier)


def stop_limit_s(topology: Topology) -> float:
    """Seconds after which a trainer that is told to stop ends without a checkpoint."""
    return STEP_S + checkpoint_bytes(topology) / BYTES_PER_S
