"""Reads single tensors from Hugging Face model folders, and writes such folders. It neither unpickles nor downloads
anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.model import value_head
from shared.model.stored import StoredNames
from shared.rpc.errors import BadInput
from shared.topology import tied_weights


class ModelFiles:
    """The tensors in `folder` by name, read on demand, so that a rank reads only its own part of a model."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], stored: StoredNames | None = None) -> None:
        """`stored` divides those tensors that the folder does not have as they are.

        Raises RpcError(bad_request) if tensors of `shapes` are missing or have different shapes, or if tied tensors
        differ. A value head may be missing, in which case it is zero (`value_head.stored_head`)."""
        self._folder = folder
        self._shapes = shapes
        self._file_of: dict[str, Path] = {}
        score = shapes.get(value_head.WEIGHT)
        self._score = None if score is None else value_head.stored_head(folder, score)
        self._parts: dict[str, list[str]] = {}
        needed, found = dict(shapes), dict[str, tuple[int, ...]]()
        try:
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dict
                        self._file_of[name] = file
                        found[name] = tuple(opened.get_slice(name).get_shape())
            # Without the language model's output layer, nothing is tied.
            differs = tied_weights.ambiguity(str(folder)) if score is None else ""
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unusable(f"cannot be loaded: {str(error)[:300]}") from error
        if differs:
            raise self._unusable(differs)
        missing = sorted(shapes.keys() - found.keys() - {value_head.WEIGHT})
        if stored is not None:
            for name in missing:
                parts = stored.of({name: torch.empty(needed.pop(name), device="meta")})
                self._parts[name] = list(parts)
                needed |= {part: tuple(tensor.shape) for part, tensor in parts.items()}
        if value_head.WEIGHT not in found:
            needed.pop(value_head.WEIGHT, None)
        wrong = sorted(name for name, shape in needed.items() if found.get(name) != shape)
        if wrong:
            raise self._unusable(
                f"weights are missing or have the wrong shape: {', '.join(wrong[:3])}; save the model again"
            )

    def __call__(self, name: str) -> Tensor:
        """Return one full tensor, in the file's dtype."""
        if name == value_head.WEIGHT and self._score is not None:
            return self._score
        if name in self._parts:
            pieces = [self(part) for part in self._parts[name]]
            if len(pieces) == 1:
                return pieces[0]
            count = self._shapes[name][0]  # experts, whose gates precede the up projections
            return torch.stack([torch.cat(pieces[expert::count]) for expert in range(count)])
        try:
            with safe_open(self._file_of[name], "pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unusable(f"cannot be loaded: {str(error)[:300]}") from error
        return tensor

    def _unusable(self, why: str) -> BadInput:
        return BadInput(f"model {self._folder}: {why}")


def write(
    folder: Path, config: Any, weights: dict[str, Tensor], dtype: torch.dtype, stored: StoredNames | None = None
) -> None:
    """Write the configuration and safetensors, under the names that `stored` gives them, so that `from_pretrained` of
    the model's class can read them.

    A view of a larger buffer, such as a megatron-core parameter on a rank that holds all of it, is copied first,
    because the writer treats tensors that share a storage as one weight with several names. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    named = weights if stored is None or not weights else stored.of(weights)
    save_torch_state_dict(
        {name: _with_own_storage(tensor) for name, tensor in named.items()}, folder, metadata={"format": "pt"}
    )


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor as a contiguous tensor whose storage holds nothing else."""
    whole = tensor.contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
