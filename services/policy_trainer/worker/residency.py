"""Which parts of the training state are on the device: a pure state machine. Moves nothing and touches no tensor.

What a call needs is declared once, here, and brought back before it runs: nobody has to remember to backload.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from proto import messages
from proto.messages import ErrorCode, WorkerRequest
from shared.rpc.errors import RpcError

Part = Literal["parameters", "gradients", "optimizer"]
"""What a backend can move; float32 masters belong to `optimizer` where they are tensors of their own."""

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
"""A gradient on the host is added to on the device, so `ForwardBackward` needs what was accumulated before."""


class Residency:
    """Where each part is. All parts begin on the device."""

    def __init__(self) -> None:
        self.on_host: frozenset[Part] = frozenset()

    def offload(self, parts: frozenset[Part]) -> frozenset[Part]:
        """Those of `parts` that are still on the device, to be taken off; they count as being on the host."""
        moving = parts - self.on_host
        self.on_host |= parts
        return moving

    def backload(self, parts: frozenset[Part]) -> frozenset[Part]:
        """Those of `parts` that are on the host, to be brought back."""
        moving = parts & self.on_host
        self.on_host -= parts
        return moving

    def forget(self) -> None:
        """Everything is on the device again (state was loaded anew)."""
        self.on_host = frozenset()


def parts_named(names: list[str]) -> frozenset[Part]:
    """The parts of a request. Raises RpcError(bad_request) for one that does not exist."""
    unknown = sorted(set(names) - PARTS)
    if unknown:
        raise RpcError(ErrorCode.BAD_REQUEST, f"part {unknown[0]!r}: use {', '.join(sorted(PARTS))}")
    return frozenset(part for part in PARTS if part in names)
