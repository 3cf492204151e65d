"""Holds the loaded model of a rank, with what is derived from its weights.

Everything that the rank needs to continue after a step with bit-identical results is a set of named tensors:

own/<name>      its part of weights and optimizer (`Backend.own_state`)
earlier/<name>  the earlier policy versions that it keeps (`EarlierVersions`)
random/<name>   the states of torch's random generators, from which a model or a loss function may draw
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.policy_trainer.worker.backend import Backend
from services.policy_trainer.worker.weights.publish import Canaries, EarlierVersions

_OWN, _EARLIER, _RANDOM = "own", "earlier", "random"
_CPU, _DEVICE = "cpu", "cuda"


@dataclass(frozen=True)
class Loaded:
    """The parts of a loaded model. Use them only on the compute thread."""

    backend: Backend
    canaries: Canaries | None
    """None for a model that is not published."""
    earlier: EarlierVersions

    def record(self, step: int) -> None:
        """Keep this version, if earlier versions may be needed. Every rank calls this as part of a collective."""
        if self.earlier.depth and self.canaries is not None:
            self.earlier.record(step, self.backend.published(), self.canaries.current())

    def state(self, step: int) -> dict[str, Tensor]:
        """Return everything that this rank needs to continue after `step`. The next update changes the tensors."""
        random = {_CPU: torch.get_rng_state()}
        if torch.cuda.is_available():
            random[_DEVICE] = torch.cuda.get_rng_state()
        parts = {_OWN: self.backend.own_state(), _EARLIER: self.earlier.tensors(step), _RANDOM: random}
        return {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state` returned in another life of the same rank."""
        parts: dict[str, dict[str, Tensor]] = {_OWN: {}, _EARLIER: {}, _RANDOM: {}}
        for key, tensor in state.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        self.backend.load_own_state(parts[_OWN])
        self.earlier.restore({name: tensor.clone() for name, tensor in parts[_EARLIER].items()}, self.canaries)
        torch.set_rng_state(parts[_RANDOM][_CPU].clone())
        if _DEVICE in parts[_RANDOM]:
            torch.cuda.set_rng_state(parts[_RANDOM][_DEVICE].clone())
