"""Collects everything that one rank needs to continue after a step with bit-identical results, as named tensors:

own/<name>      its part of weights and optimizer (`Backend.own_state`)
earlier/<name>  the earlier policy versions that it keeps (`earlier.EarlierVersions`)
random/<name>   the states of torch's random generators, from which a model or a loss function may draw
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.policy_trainer.worker.backend import Backend
from services.policy_trainer.worker.weights.publish import Canaries, EarlierVersions

_OWN, _EARLIER, _RANDOM = "own", "earlier", "random"
_CPU, _DEVICE = "cpu", "cuda"


def rank_state(backend: Backend, earlier: EarlierVersions, step: int) -> dict[str, Tensor]:
    """Return the state after `step`. The next update changes its tensors."""
    parts = {_OWN: backend.own_state(), _EARLIER: earlier.tensors(step), _RANDOM: random_states()}
    return {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}


def load_rank_state(
    state: Mapping[str, Tensor], backend: Backend, earlier: EarlierVersions, canaries: Canaries
) -> None:
    """Load the tensors that `rank_state` returned in another life of the same rank."""
    parts: dict[str, dict[str, Tensor]] = {_OWN: {}, _EARLIER: {}, _RANDOM: {}}
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    backend.load_own_state(parts[_OWN])
    earlier.restore({name: tensor.clone() for name, tensor in parts[_EARLIER].items()}, canaries)
    set_random_states(parts[_RANDOM])


def random_states() -> dict[str, Tensor]:
    """Return copies of the states of torch's generators, for the CPU and for this rank's GPU if it has one."""
    states = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[_DEVICE] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Set the generators to the states that `random_states` returned."""
    torch.set_rng_state(states[_CPU].clone())
    if _DEVICE in states:
        torch.cuda.set_rng_state(states[_DEVICE].clone())
