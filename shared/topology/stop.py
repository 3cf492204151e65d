"""Limits the time in which a stopping run saves its state: one limit for launcher, guard and services."""

from __future__ import annotations

from shared.topology.capacity import weight_bytes
from shared.topology.schema import Topology

STEP_S = 60.0
"""Seconds for work that does not grow with the checkpoint: the open step, and calls between services."""
BYTES_PER_S = 32 << 20
"""Minimum rate, that of a slow disk, at which a checkpoint is written, synced and read back."""
_MOMENTS = 2
"""Number of float32 values that the optimizer keeps per parameter, besides the parameter itself (AdamW)."""


def checkpoint_bytes(topology: Topology) -> int:
    """Estimate the bytes of one checkpoint: float32 weights, optimizer moments, in deterministic mode earlier versions.

    Returns 0 if the model cannot be measured, which the check of the topology reports.
    """
    try:
        weights = weight_bytes(topology.policy.model, "float32")
    except (OSError, ValueError):
        return 0
    earlier = topology.staleness if topology.run.deterministic else 0
    return weights * (1 + _MOMENTS + earlier)


def stop_limit_s(topology: Topology) -> float:
    """Return the seconds after which a trainer that is told to stop ends without a checkpoint."""
    return STEP_S + checkpoint_bytes(topology) / BYTES_PER_S
