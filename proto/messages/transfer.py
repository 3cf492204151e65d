"""Weights over collectives: what an engine and the trainer's rank 0 agree on beside the bytes themselves.

Everything that a library would exchange by itself (where to meet, NCCL's unique id) travels here, typed.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


class TransferParameter(Record, frozen=True, array_like=True):
    """One tensor of a transfer: its `dtype` by the wire's name."""

    name: str
    dtype: str
    shape: list[int]


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a GPU that another process on it can open: the numbers of CUDA IPC, as torch names them."""

    gpu: str
    """The GPU's own id (UUID)."""
    nbytes: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


@message(114)
class TransferOffer(Message, frozen=True, kw_only=True):
    """Answer to `AskTransfer`: transfer `number` of `communicator` has begun, `parameters` come in this order.

    A `communicator` other than the one the engine holds is to be joined first, as rank 1 and up: at the file `meeting`
    in the run's private folder (gloo), or with NCCL's `unique_id`. With `memory` (CUDA IPC) nothing is joined or sent:
    the parameters lie there, one behind the other. Joining and transfer end within `deadline_s`.
    """

    communicator: int
    number: int
    deadline_s: float
    parameters: list[TransferParameter]
    meeting: str = ""
    unique_id: bytes = b""
    memory: DeviceMemory | None = None


@message(115)
class AskTransfer(Request, frozen=True, kw_only=True):
    """An engine asks for the weights of version (lineage, step), or, with `drill`, for the start-up drill's.

    `communicator`: the one that this life of the engine holds, 0 for none; `ranks`: its processes that receive.
    Error missing: the trainer cannot send that version any more; the shards are still there.
    """

    REPLY: ClassVar[type[Message]] = TransferOffer
    instance: int
    incarnation: int
    communicator: int
    ranks: int
    host_id: str
    lineage: int
    step: int
    drill: bool = False


@message(116)
class EndTransfer(Request, frozen=True, kw_only=True):
    """The engine has all of transfer `number`, or (`failure`) gave it up: then the communicator is no more."""

    REPLY: ClassVar[type[Message]] = Ack
    instance: int
    incarnation: int
    communicator: int
    number: int
    failure: str = ""
