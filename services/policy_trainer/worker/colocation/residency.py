"""A pure state machine that tracks which parts of the training state are on the device. It moves no tensors itself.

The parts that each call needs are declared here and brought back before the call runs, so callers need not backload.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from proto import messages
from proto.messages import ErrorCode, WorkerRequest
from shared.rpc.errors import RpcError

Part = Literal["parameters", "gradients", "optimizer"]
"""A part that a backend can move. float32 masters belong to `optimizer` if they are separate tensors."""

PARTS: frozenset[Part] = frozenset({"parameters", "gradients", "optimizer"})
_PARAMETERS: frozenset[Part] = frozenset({"parameters"})

NEEDS: Mapping[type[WorkerRequest], frozenset[Part]] = MappingProxyType(
    {
        messages.InitModel: PARTS,
        messages.LoadCheckpoint: PARTS,
        messages.Forward: _PARAMETERS,
        messages.ForwardBackward: frozenset({"parameters", "gradients"}),
        messages.OptimStep: PARTS,
        messages.SkipUpdate: frozenset({"parameters", "gradients"}),
        messages.Publish: _PARAMETERS,
        messages.SaveCheckpoint: frozenset({"parameters", "optimizer"}),
        messages.SaveModel: _PARAMETERS,
        messages.Move: frozenset(),
    }
)
"""Parts that each call needs on the device. `ForwardBackward` adds to the gradients there, so it needs the earlier
gradients."""


class Residency:
    """The location of each part. Initially, all parts are on the device."""

    def __init__(self) -> None:
        self.on_host: frozenset[Part] = frozenset()

    def offload(self, parts: frozenset[Part]) -> frozenset[Part]:
        """Mark `parts` as on the host and return those that must still be moved there."""
        moving = parts - self.on_host
        self.on_host |= parts
        return moving

    def backload(self, parts: frozenset[Part]) -> frozenset[Part]:
        """Mark `parts` as on the device and return those that must still be moved there."""
        moving = parts & self.on_host
        self.on_host -= parts
        return moving

    def forget(self) -> None:
        """Mark all parts as on the device, after the state was reloaded."""
        self.on_host = frozenset()


def parts_named(names: list[str]) -> frozenset[Part]:
    """Return the parts named in a request. Raises RpcError(bad_request) for an unknown name."""
    unknown = sorted(set(names) - PARTS)
    if unknown:
        raise RpcError(ErrorCode.BAD_REQUEST, f"part {unknown[0]!r}: use {', '.join(sorted(PARTS))}")
    return frozenset(part for part in PARTS if part in names)
