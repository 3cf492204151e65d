"""The names and the division of weights in a checkpoint. transformers 5 holds all experts of a layer in two tensors,
and renames others; checkpoints, and vLLM, have a tensor for each matrix of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


class StoredNames:
    """The mapping of weights of a Hugging Face configuration's model to their checkpoint."""

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            self._model = cast(Any, AutoModelForCausalLM).from_config(config)

    def of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `weights` as a checkpoint has them. Some share memory with those that are given."""
        return cast(dict[str, Tensor], revert_weight_conversion(self._model, dict(weights)))

    def check_each(self) -> None:
        """Raise ValueError if a tensor of the checkpoint belongs to several weights, so that they cannot be converted
        one by one."""
        held = self._model.state_dict()
        alone = [pair for name, tensor in held.items() for pair in _shapes(self.of({name: tensor}))]
        if sorted(alone) != sorted(_shapes(self.of(held))):
            kind = self._model.config.model_type
            raise ValueError(
                f"model_type {kind!r}: several weights are one tensor of its checkpoint; use engine transformers"
            )


def _shapes(weights: Mapping[str, Tensor]) -> list[tuple[str, torch.Size]]:
    return [(name, tensor.shape) for name, tensor in weights.items()]
