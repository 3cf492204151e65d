"""Defines the state of a training model in the form that does not depend on ranks or backends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TrainingState:
    """Everything that a later life of the worker needs to continue with bit-identical results.

    `weights`: Hugging Face name -> full tensor in the topology's dtype, on the CPU; tied weights appear once (as in
    `shared.model.load.named_weights`). `optimizer`: `<slot>/<name>` -> full float32 tensor of the weight's shape; the
    slot `step` is a float32 scalar (number of updates). All are copies, so training may continue while they are
    written.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
