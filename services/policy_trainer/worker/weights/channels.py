"""Provides one kind of channel for each route. A channel opens, uses and closes a communicator with one engine. The
caller decides when.

Except for `give_up`, a channel is used by only one thread. In particular, only that thread destroys the communicator.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Protocol

import msgspec

from proto.messages import DeviceMemory, TransferOffer
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute

if TYPE_CHECKING:
    from torch import Tensor

    from services.policy_trainer.worker.weights.nccl import NcclGroup
    from services.policy_trainer.worker.weights.outgoing import OutgoingWeights
    from shared.weights.gloo import GlooGroup


PART_BYTES = 1 << 30
"""Maximum number of bytes of a version that are in the memory for CUDA IPC at a time, unless they are a single tensor.
vLLM copies each part."""


class Channel(Protocol):
    """A communicator. All methods but `give_up` run on its thread; `announce` and `send` may raise TransferLost."""

    @property
    def part_bytes(self) -> int | None:
        """Maximum number of bytes that one transfer carries, unless it carries a single tensor; None: no limit."""

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        """Return `offer` with the data that the engine needs to join the communicator or to find `weights`, the tensors
        that the transfer carries."""

    def send(self, weights: OutgoingWeights) -> None:
        """Join all ranks of the engine and send them `weights`. Stop at the deadline."""

    def ended(self) -> None:
        """Record that the engine has received everything."""

    def give_up(self) -> None:
        """Make `send` return at once if the route allows it, otherwise by its deadline. Any thread may call this."""

    def close(self) -> None:
        """Destroy the communicator."""


def open_channel(route: WeightsRoute, meeting: Meeting, ranks: int, *, device: str, deadline_s: float) -> Channel:
    """Return a channel that has not been joined yet.

    The ranks of a gloo channel meet at `meeting`. `ranks` is the number of the engine's ranks plus one for this rank.
    `device` belongs to this rank. Raises ValueError for route shards, which needs no channel.
    """
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
    part_bytes: int | None = None

    def __init__(self, meeting: Meeting, ranks: int, deadline_s: float) -> None:
        self._meeting = meeting
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._given_up = threading.Event()
        self._group: GlooGroup | None = None

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        file = self._meeting.file
        return msgspec.structs.replace(offer, meeting=file.name if file is not None else "", store=self._meeting.store)

    def send(self, weights: OutgoingWeights) -> None:
        from shared.weights.gloo import GlooGroup, TransferLost

        if self._given_up.is_set():
            raise TransferLost("the transfer was given up before it began")
        if self._group is None:
            self._group = GlooGroup(self._meeting, 0, self._ranks, deadline_s=self._deadline_s)
        self._group.broadcast(itertools.chain.from_iterable(weights.chunks("cpu")))

    def ended(self) -> None:
        if self._meeting.file is not None:  # only now, because another rank may read it after this one joins
            self._meeting.file.unlink(missing_ok=True)

    def give_up(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        self._group = None
        self.ended()


class NcclChannel:
    part_bytes: int | None = None

    def __init__(self, interface: str, ranks: int, device: str, deadline_s: float) -> None:
        self._interface = interface
        self._ranks = ranks
        self._device = device
        self._deadline_s = deadline_s
        self._unique_id = b""
        self._given_up = threading.Event()
        self._group: NcclGroup | None = None

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        from services.policy_trainer.worker.weights.nccl import NcclGroup, new_unique_id

        if self._group is None:
            self._unique_id = new_unique_id(self._interface)
            self._group = NcclGroup(
                self._unique_id,
                self._ranks,
                device=self._device,
                deadline_s=self._deadline_s,
                given_up=self._given_up,
            )
        return msgspec.structs.replace(offer, unique_id=self._unique_id)

    def send(self, weights: OutgoingWeights) -> None:
        if self._group is not None:
            self._group.broadcast(weights.chunks(self._device))

    def ended(self) -> None:
        """Do nothing: the communicator is reused."""

    def give_up(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class MemoryChannel:
    """CUDA IPC sends nothing: both processes use the same GPU, where the engine reads a copy.

    The copies of all parts of a version take turns in the same memory, which the engine opens once: vLLM closes it only
    when it has the whole version.
    """

    part_bytes: int | None = PART_BYTES

    def __init__(self, device: str) -> None:
        from services.policy_trainer.worker.weights.side_stream import SideStream

        self._device = device
        self._stream = SideStream()
        self._copy: Tensor | None = None
        self._offered: DeviceMemory | None = None
        """The memory that the engine may have open."""
        self._is_last = True

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        import torch

        from shared.weights.memory import exported, pack_into, room
        from shared.weights.table import in_parts, nbytes

        device = torch.device(self._device)
        if self._copy is None or not offer.first:
            if self._offered is not None:
                self.close()  # the engine has left a version unfinished
            largest = max(nbytes(offer.parameters[part]) for part in in_parts(offer.parameters, self.part_bytes))
            with self._stream.at_once(device):  # the stream that fills the memory must also allocate it
                self._copy = room(largest, self._device)
                self._offered = exported(self._copy)
        end = 0
        for chunk in weights.chunks(self._device):
            with self._stream.at_once(device):
                end += pack_into(self._copy[end:], chunk)
        self._is_last = not offer.left
        return msgspec.structs.replace(offer, memory=self._offered)

    def send(self, weights: OutgoingWeights) -> None:
        """Do nothing: the engine reads the copy."""

    def ended(self) -> None:
        if self._is_last:
            self._offered = None  # the engine has closed it
            self.close()

    def give_up(self) -> None:
        """Do nothing: `send` does not wait."""

    def close(self) -> None:
        from shared.weights.memory import give_back, withdraw

        self._copy, offered, self._offered = None, self._offered, None
        if offered is not None:
            withdraw(offered)
        give_back()
