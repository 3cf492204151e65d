"""The index arrays of a micro-batch on the device that computes it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shared.model.tree import MicroBatch
from shared.tensors_torch import to_device


@dataclass(frozen=True)
class Nodes:
    """The arrays of a `MicroBatch` of the same names, as int64 tensors. Those of its blocks belong to attention."""

    token_ids: Tensor
    depths: Tensor
    predictors: Tensor
    child_predictor: Tensor
    child_token: Tensor
    tokens: Tensor
    token_child: Tensor


def to_nodes(batch: MicroBatch, device: torch.device) -> Nodes:
    """Return the arrays of `batch` on `device`, moved in one copy."""
    return Nodes(*to_device([getattr(batch, field.name) for field in fields(Nodes)], device))
