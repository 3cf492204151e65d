"""A policy version as a set of named tensors. It is the record that both ends share: the trainer publishes it, the
scheduler announces its kind and base, and engines load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import xxhash

from proto import dtypes
from proto.messages import TransferParameter, WeightsKind

if TYPE_CHECKING:
    from torch import Tensor

    from proto.tensors import Array

_NAMED = 4
"""Maximum number of names in an error."""


@dataclass(frozen=True)
class Base:
    """The weights over which an adapter lies, which never change. `digests` are in the order of the sorted names."""

    digests: Sequence[int]

    @classmethod
    def of(cls, digests: Mapping[str, int]) -> Base:
        """Return the base whose tensors have these digests, by name."""
        return cls([digests[name] for name in sorted(digests)])

    @property
    def name(self) -> str:
        """A name that other weights do not have: 16 hexadecimal digits."""
        return f"{xxhash.xxh3_64_intdigest(b''.join(number.to_bytes(8, 'little') for number in self.digests)):016x}"


@dataclass(frozen=True)
class WeightSet:
    """The tensors of a version, in the order in which they are sent. A tied weight occurs once, under its first name.

    `base` are the weights over which an adapter lies; it is None for a full version. `digests` is in the order of the
    sorted names, or empty if the bits are proved in another way.
    """

    parameters: Sequence[TransferParameter]
    base: Base | None = None
    digests: Sequence[int] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor | Array], base: Base | None = None) -> WeightSet:
        """Return the set of `tensors`. Raises WireError for a dtype that cannot be sent."""
        return cls(described(tensors), base)

    @property
    def kind(self) -> WeightsKind:
        return WeightsKind.FULL if self.base is None else WeightsKind.ADAPTER

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return nbytes(self.parameters)

    @property
    def digest_of(self) -> dict[str, int]:
        """The digests by name."""
        return dict(zip(sorted(self.names), self.digests, strict=False))

    def check_fits(self, given: WeightSet) -> None:
        """Raise ValueError if `given` cannot replace these tensors: a name, a type or a shape differs."""
        ours, theirs = ({row.name: row for row in weights.parameters} for weights in (self, given))
        hint = "is policy.model the one being trained?"
        missing, unexpected = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        if missing or unexpected:
            raise ValueError(
                f"{len(theirs)} parameters given for the engine's {len(ours)}: missing {shown(missing)}, "
                f"unexpected {shown(unexpected)}; {hint}"
            )
        for name, parameter in ours.items():
            other = theirs[name]
            if other != parameter:
                raise ValueError(
                    f"parameter {name}: {other.dtype} {list(other.shape)} given, but the engine's model has "
                    f"{parameter.dtype} {list(parameter.shape)}; {hint}"
                )


def described(tensors: Mapping[str, Tensor | Array]) -> list[TransferParameter]:
    """Return one row for each of `tensors`, in order. Raises WireError for a dtype that cannot be sent."""
    return [
        TransferParameter(name, dtypes.by_name(str(tensor.dtype).removeprefix("torch.")).name, list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def room_for(parameters: Sequence[TransferParameter]) -> dict[str, Tensor]:
    """Return uninitialised host memory for `parameters`, in order. Raises WireError for an unknown dtype."""
    import torch  # only here, because the services' light processes describe weights, too

    return {
        parameter.name: torch.empty(parameter.shape, dtype=getattr(torch, dtypes.by_name(parameter.dtype).name))
        for parameter in parameters
    }


def in_parts(parameters: Sequence[TransferParameter], limit_bytes: int | None = None) -> list[slice]:
    """Return consecutive parts of `parameters`, each with at most `limit_bytes` or a single tensor. There is at least
    one part."""
    begins, total = [0], 0
    for at, parameter in enumerate(parameters):
        size = nbytes([parameter])
        if limit_bytes is not None and at > begins[-1] and total + size > limit_bytes:
            begins.append(at)
            total = 0
        total += size
    return [slice(begin, end) for begin, end in pairwise([*begins, len(parameters)])]


def nbytes(parameters: Sequence[TransferParameter]) -> int:
    """Return the total size of `parameters` in bytes."""
    total = 0
    for parameter in parameters:
        size = dtypes.by_name(parameter.dtype).itemsize
        for length in parameter.shape:
            size *= length
        total += size
    return total


def shown(names: Sequence[str]) -> str:
    """Return the first few names and the number of the others."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + rest
