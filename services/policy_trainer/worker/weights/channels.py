"""Sends the tensors of a version to one engine. There is one kind of channel for each route; it opens, uses and closes
a communicator. The caller decides when.

Except for `give_up`, a channel is used by only one thread. In particular, only that thread destroys the communicator.

While the trainer's own weights are still the version, copies of them are sent from GPU to GPU, in chunks of bounded
size. Afterwards, the weights in the store are sent. Training waits at most for the copy of one chunk, never for an
engine.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from proto.messages import DeviceMemory, TransferOffer, TransferParameter
from services.policy_trainer.worker.weights.nccl import NcclGroup, new_unique_id
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute
from shared.weights import memory, weight_set
from shared.weights.gloo import GlooGroup, TransferLost

PART_BYTES = 1 << 30
"""Maximum number of bytes of a version that are in the memory for CUDA IPC at a time, unless they are a single tensor.
vLLM copies each part."""
CHUNK_BYTES = 256 * 1024**2
"""Maximum size, in bytes, of a chunk that is not a single tensor. A transfer takes up the memory of one chunk in
addition to the weights."""
Version = tuple[int, int]
"""Lineage and step."""


class SideStream:
    """Runs GPU work that must neither wait for the training that other threads issue, nor be waited for by it.

    It has a CUDA stream on each device, created when it is first needed. On a CPU, it does nothing.

    Keep the object: torch keeps freed memory apart for every stream.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    @contextlib.contextmanager
    def at_once(self, device: torch.device) -> Iterator[None]:
        """Run the work in the `with` block, and wait until it is done. It may use only finished tensors."""
        if device.type != "cuda":
            yield
            return
        cuda: Any = torch.cuda  # torch.cuda is partly untyped
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream = self._streams[device]
        try:
            with cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    @contextlib.contextmanager
    def after_training(self, device: torch.device) -> Iterator[None]:
        """As `at_once`, but begin after the work that has been issued so far."""
        with self.at_once(device):
            if device.type == "cuda":
                cuda: Any = torch.cuda
                cuda.current_stream(device).wait_stream(cuda.default_stream(device))
            yield


class LiveWeights:
    """The last published version on the device where it is trained, until its weights change. Any thread may use it."""

    def __init__(self, kind: str = "cuda") -> None:
        """Weights on devices of another `kind` are not copied from there, because on a CPU the store is just as
        near."""
        self._kind = kind
        self._lock = threading.Lock()
        self._stream = SideStream()
        self._version: Version | None = None
        self._weights: Mapping[str, Tensor] = {}

    def show(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Let transfers copy `weights`, if all of them are on devices of this kind."""
        here = bool(weights) and all(tensor.device.type == self._kind for tensor in weights.values())
        with self._lock:
            self._version, self._weights = (version, weights) if here else (None, {})

    def withdraw(self) -> None:
        """Prevent new copies, and return once no copy is in progress, so that the weights can be changed."""
        with self._lock:
            self._version, self._weights = None, {}

    def parameters(self, version: Version) -> list[TransferParameter] | None:
        """Return the parameter table of `version`, or None if `version` is not here."""
        with self._lock:
            return weight_set.described(self._weights) if version == self._version else None

    def copies(self, version: Version, names: Sequence[str], device: str) -> list[Tensor] | None:
        """Return finished copies on `device` of the tensors called `names`, or None if `version` is not here."""
        with self._lock:
            if version != self._version:
                return None
            with self._stream.at_once(torch.device(device)):
                return [self._weights[name].detach().to(device, copy=True).contiguous() for name in names]


@dataclass
class OutgoingWeights:
    """The tensors of one version, in the order of `parameters`. Use it only on the thread of one transfer."""

    parameters: list[TransferParameter]
    stored: Callable[[], Mapping[str, Tensor]]
    """Function that returns the tensors in host memory. The first call may block; the result is kept. It is called only
    if the live weights are not (or no longer) this version."""
    live: LiveWeights = field(default_factory=LiveWeights)
    version: Version = (-1, -1)

    def chunks(self, device: str) -> Iterator[list[Tensor]]:
        """Yield the tensors in order: live ones as copies on `device`, stored ones where they are."""
        for chunk in weight_set.in_parts(self.parameters, CHUNK_BYTES):
            names = [parameter.name for parameter in self.parameters[chunk]]
            copies = self.live.copies(self.version, names, device)
            yield [self.stored()[name] for name in names] if copies is None else copies


class Channel(Protocol):
    """A communicator. All methods but `give_up` run on its thread; `announce` and `send` may raise TransferLost."""

    @property
    def part_bytes(self) -> int | None:
        """Maximum number of bytes that one transfer carries, unless it carries a single tensor; None: no limit."""

    @property
    def joined(self) -> bool:
        """Whether the engine has joined. Always true if an engine that waits for this rank stops at its deadline."""

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
    joined = True

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

    @property
    def joined(self) -> bool:
        return self._group is not None and self._group.joined

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
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
    joined = True

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = SideStream()
        self._copy: Tensor | None = None
        self._offered: DeviceMemory | None = None
        """The memory that the engine may have open."""
        self._is_last = True

    def announce(self, offer: TransferOffer, weights: OutgoingWeights) -> TransferOffer:
        device = torch.device(self._device)
        if self._copy is None or not offer.first:
            if self._offered is not None:
                self.close()  # the engine has left a version unfinished
            largest = max(
                weight_set.nbytes(offer.parameters[part])
                for part in weight_set.in_parts(offer.parameters, self.part_bytes)
            )
            with self._stream.at_once(device):  # the stream that fills the memory must also allocate it
                self._copy = memory.room(largest, self._device)
                self._offered = memory.exported(self._copy)
        end = 0
        for chunk in weights.chunks(self._device):
            with self._stream.at_once(device):
                end += memory.pack_into(self._copy[end:], chunk)
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
        self._copy, offered, self._offered = None, self._offered, None
        if offered is not None:
            memory.withdraw(offered)
        memory.give_back()
