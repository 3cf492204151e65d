"""The random numbers that a model or a loss function draws from torch: the state of its generators on this rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CPU, _DEVICE = "cpu", "cuda"


def states() -> dict[str, Tensor]:
    """Return copies of the states of torch's generators: that of the CPU, and that of this rank's GPU if it has one."""
    found = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        found[_DEVICE] = torch.cuda.get_rng_state()
    return found


def restore(states: Mapping[str, Tensor]) -> None:
    """Set the generators to what `states` returned."""
    torch.set_rng_state(states[_CPU].clone())
    if _DEVICE in states:
        torch.cuda.set_rng_state(states[_DEVICE].clone())
