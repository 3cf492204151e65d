"""Channels for each route: how a communicator to one engine is opened, used and closed. The caller decides when.

Except for `ended` and `close`, a channel must not be used by two threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from proto.messages import TransferOffer
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute

if TYPE_CHECKING:
    from torch import Tensor

    from services.policy_trainer.worker.weights.nccl import NcclGroup
    from shared.weights.gloo import GlooGroup


class Channel(Protocol):
    """A communicator. All methods but `ended` and `close` run on its thread and may raise TransferLost."""

    def announce(self, offer: TransferOffer, tensors: Mapping[str, Tensor]) -> TransferOffer:
        """Return `offer` with the data that the engine needs to join the communicator or to find `tensors`."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Join all ranks of the engine and send them `tensors`. It gives up at the deadline."""

    def ended(self) -> None:
        """Record that the engine has received everything."""

    def close(self) -> None:
        """Destroy the communicator. A thread in `send` returns from it by its deadline at the latest."""


def open_channel(route: WeightsRoute, meeting: Meeting, ranks: int, *, device: str, deadline_s: float) -> Channel:
    """Return a channel that is not joined yet. Gloo meets at `meeting`, `ranks` counts those of the engine and this
    one, and `device` belongs to this rank. Raises ValueError for route shards, which needs no channel."""
    match route:
        case "gloo":
            return GlooChannel(meeting, ranks, deadline_s)
        case "nccl":
            return NcclChannel(meeting.interface, ranks, device, deadline_s)
        case "ipc":
            return MemoryChannel(device)
        case "shards":
            raise ValueError("route shards has no channel: engines read the stores")


class GlooChannel:
    def __init__(self, meeting: Meeting, ranks: int, deadline_s: float) -> None:
        self._meeting = meeting
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._group: GlooGroup | None = None

    def announce(self, offer: TransferOffer, tensors: Mapping[str, Tensor]) -> TransferOffer:
        file = self._meeting.file
        return msgspec.structs.replace(offer, meeting=file.name if file is not None else "", store=self._meeting.store)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        from shared.weights.gloo import GlooGroup

        if self._group is None:
            self._group = GlooGroup(self._meeting, 0, self._ranks, deadline_s=self._deadline_s)
        self._group.broadcast(tensors.values())

    def ended(self) -> None:
        if self._meeting.file is not None:  # not earlier: another rank may read it after this one has joined
            self._meeting.file.unlink(missing_ok=True)

    def close(self) -> None:
        self._group = None  # its sockets close once no thread uses it
        self.ended()


class NcclChannel:
    def __init__(self, interface: str, ranks: int, device: str, deadline_s: float) -> None:
        self._interface = interface
        self._ranks = ranks
        self._device = device
        self._deadline_s = deadline_s
        self._unique_id = b""
        self._group: NcclGroup | None = None

    def announce(self, offer: TransferOffer, tensors: Mapping[str, Tensor]) -> TransferOffer:
        from services.policy_trainer.worker.weights.nccl import NcclGroup, new_unique_id

        if self._group is None:
            self._unique_id = new_unique_id(self._interface)
            self._group = NcclGroup(self._unique_id, self._ranks, device=self._device, deadline_s=self._deadline_s)
        return msgspec.structs.replace(offer, unique_id=self._unique_id)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        if self._group is not None:
            self._group.broadcast(tensors.values())

    def ended(self) -> None:
        """Do nothing: the communicator is reused."""

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class MemoryChannel:
    """CUDA IPC: nothing is sent. A copy stays on the GPU that both processes use until the engine has taken it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._copy: Tensor | None = None

    def announce(self, offer: TransferOffer, tensors: Mapping[str, Tensor]) -> TransferOffer:
        from shared.weights.memory import exported, packed

        self._copy = packed(tensors, self._device)
        return msgspec.structs.replace(offer, memory=exported(self._copy))

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the engine reads the copy."""

    def ended(self) -> None:
        self.close()

    def close(self) -> None:
        from shared.weights.memory import give_back

        self._copy = None
        give_back()
