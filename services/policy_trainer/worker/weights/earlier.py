"""Keeps read-only copies of the last few policy versions alongside the version in training (`run.deterministic`).

Step s is sampled with version s - 1 - staleness. A run that goes back to the checkpoint of step c after losing samples
needs the versions from c - staleness onwards, which later training does not reproduce. They are therefore kept here,
saved in the checkpoint, and published again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from proto.messages import Canary
from services.policy_trainer.worker.weights.publish import Canaries
from shared.tensors_torch import to_numpy

_CANARY = "canary"
_NAME = re.compile(r"(\d+)/(.+)")


@dataclass(frozen=True)
class EarlierVersion:
    """A policy version: its weights by Hugging Face name, on the CPU, and the log-probs with which their loading is
    verified."""

    weights: dict[str, Tensor]
    canary: Canary


class EarlierVersions:
    """The newest version and at most `depth` versions before it. Ranks other than 0 hold none."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._versions: dict[int, EarlierVersion] = {}

    def get(self, step: int) -> EarlierVersion | None:
        return self._versions.get(step)

    def record(self, step: int, weights: dict[str, Tensor], canary: Canary) -> None:
        """Store a copy of `weights` as version `step`.

        Drop versions from `step` onwards and those before `step - depth`.
        """
        if weights and self._depth:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
            self._versions = {old: each for old, each in self._versions.items() if step - self._depth <= old < step}
            self._versions[step] = EarlierVersion(copies, canary)

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return the versions before `step` as tensors `<version>/<name>` and `<version>/canary`, for a checkpoint."""
        found: dict[str, Tensor] = {}
        for old, version in self._versions.items():
            if old < step:
                found |= {f"{old}/{name}": tensor for name, tensor in version.weights.items()}
                found[f"{old}/{_CANARY}"] = torch.from_numpy(version.canary.logprobs.copy())
        return found

    def restore(self, tensors: dict[str, Tensor], canaries: Canaries) -> None:
        """Replace all versions with those in `tensors`, which the method `tensors` returned."""
        weights: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            found = _NAME.fullmatch(key)
            if found is not None:
                weights.setdefault(int(found[1]), {})[found[2]] = tensor
        self._versions = {
            step: EarlierVersion(named, canaries.of(to_numpy(named.pop(_CANARY))))
            for step, named in sorted(weights.items())
        }
