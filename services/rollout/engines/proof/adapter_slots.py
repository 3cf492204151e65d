"""Digests an adapter where vLLM's kernels read it: in one slot of the arrays of every layer that can have an adapter.

A layer has an array for A, `lora_a_stacked` [slots, 1, rank, inputs], and one for B, `lora_b_stacked` [slots, 1,
outputs, rank], or a tuple of them if it is fused from several layers. Slots may be larger than an adapter: the rank is
rounded up, and so is the vocabulary. A layer without an adapter adds nothing only if its slot is zero. This module does
not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from services.rollout.engines.proof.load_trace import Proof, WeightPart
from shared.model.adapter import A, B
from shared.weights.digests import digest

_MASK = (1 << 64) - 1


class AdaptedLayer(NamedTuple):
    """A layer with an adapter: its name in policy versions, and the sizes of A [rank, inputs] and B [outputs, rank]."""

    name: str
    rank: int
    inputs: int
    outputs: int


def slot_proof(
    layers: Mapping[str, Any],
    fused: Mapping[str, Sequence[str]],
    slot: int,
    adapted: Mapping[str, AdaptedLayer],
    weights: Sequence[WeightPart],
) -> Proof:
    """Return the proof for an adapter in `slot` of all `layers`, which are by vLLM's name.

    `fused` lists the names of the layers from which a layer is fused, in order. `adapted` lists, by vLLM's names, the
    layers with an adapter. `weights` are the parts of the base on this rank: a rank that has some rows of a weight
    needs those rows of B, and one that has some columns needs those columns of A.
    """
    weight_of = {part.name: part for part in weights}
    faults: list[str] = []
    digests: list[tuple[WeightPart, Tensor]] = []
    rests: list[tuple[str, Tensor]] = []
    """Faults, each with the number of elements that are not zero but must be."""
    for path, layer in layers.items():
        names = fused.get(path, [path])
        arrays = list(zip(_arrays(layer.lora_a_stacked), _arrays(layer.lora_b_stacked), strict=True))
        if len(arrays) != len(names):
            faults.append(f"{path}: has {len(arrays)} adapters for {len(names)} layers")
            continue
        for name, (a, b) in zip(names, arrays, strict=True):
            if name not in adapted:
                rests.append((f"{name}: has an adapter that the version does not have", a[slot].count_nonzero()))
                rests.append((f"{name}: has an adapter that the version does not have", b[slot].count_nonzero()))
                continue
            layer_name, rank, inputs, outputs = adapted[name]
            a, b = a[slot, 0], b[slot, 0]
            weight = weight_of.get(f"{layer_name}.weight")
            if weight is None and (a.shape[1] < inputs or b.shape[0] < outputs):
                faults.append(f"{layer_name}: it is not known which part of its weight this rank has")
                continue
            column = weight.column if weight is not None and a.shape[1] < inputs else 0
            row = weight.row if weight is not None and b.shape[0] < outputs else 0
            for array, part in (
                (a, WeightPart(f"{layer_name}.{A}", 0, column, rank, min(a.shape[1], inputs))),
                (b, WeightPart(f"{layer_name}.{B}", row, 0, min(b.shape[0], outputs), rank)),
            ):
                values = array[: part.rows, : part.columns]
                digests.append((part, digest(values, part.row, part.column)))
                more = array.count_nonzero() - values.count_nonzero()
                rests.append((f"{part.name}: the rest of its slot is not zero", more))
    numbers = _to_host([value for _, value in digests] + [count for _, count in rests])
    faults += [fault for (fault, _), count in zip(rests, numbers[len(digests) :], strict=True) if count]
    parts = [(part, number & _MASK) for (part, _), number in zip(digests, numbers, strict=False)]
    return Proof(parts, sorted(set(faults)))


def slot_arrays(model: nn.Module) -> Iterator[Tensor]:
    """Yield the arrays of all layers that can have an adapter."""
    for module in model.modules():
        yield from _arrays(getattr(module, "lora_a_stacked", ()))
        yield from _arrays(getattr(module, "lora_b_stacked", ()))


def _arrays(stacked: Any) -> Sequence[Tensor]:
    return (stacked,) if isinstance(stacked, Tensor) else stacked


def _to_host(scalars: Sequence[Tensor]) -> list[int]:
    """Return int64 scalars, which are on one device, as numbers. The host waits for the device once."""
    numbers: list[int] = torch.stack(list(scalars)).tolist() if scalars else []
    return numbers
