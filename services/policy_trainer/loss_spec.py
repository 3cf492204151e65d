"""Translates the topology section `algorithm` into the specification of the per-token loss that workers apply."""

from __future__ import annotations

from proto.messages import LossSpec
from shared.topology.schema import Topology

ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Names of the per-sample scalars that `forward_backward` reads."""


def loss_spec(topology: Topology) -> LossSpec:
    """Return the per-token settings in `algorithm`. Absent settings are off.

    A step with a single update does not need a separate forward pass for the proximal policy, because the training pass
    computes its log-probs.
    """
    algorithm = topology.algorithm
    loss, kl, mask = algorithm.loss, algorithm.kl, algorithm.loss.ratio_mask
    in_loss = kl is not None and kl.place == "loss" and kl.coef > 0
    clip_low, clip_high = loss.clip or (0.0, 0.0)
    gate_positive, gate_negative = loss.temperatures or (0.0, 0.0)
    return LossSpec(
        name=loss.name,
        clip_low=clip_low,
        clip_high=clip_high,
        anchor="present" if algorithm.ratio_is_one else loss.anchor,
        temperature=topology.sampling.temperature,
        tis_cap=loss.tis_cap or 0.0,
        kl_estimator=kl.estimator if kl is not None and in_loss else "",
        kl_coef=kl.coef if kl is not None and in_loss else 0.0,
        entropy_coef=algorithm.entropy_coef,
        dual_clip=loss.dual_clip or 0.0,
        clamp=loss.clamp or "",
        gate_positive=gate_positive,
        gate_negative=gate_negative,
        ratio_mask=mask.level if mask is not None else "",
        mask_low=mask.low if mask is not None else 0.0,
        mask_high=mask.high if mask is not None else 0.0,
    )
