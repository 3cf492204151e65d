"""Messages for sending weights over collectives, between an engine and rank 0 of the trainer.

The facts that a library would exchange by itself (a meeting place, NCCL's unique id) are typed fields here.
"""

from __future__ import annotations

import msgspec

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


class TransferParameter(Record, frozen=True, array_like=True):
    """One tensor of a transfer. `dtype` is its name on the wire."""

    name: str
    dtype: str
    shape: list[int]


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a GPU that another process on the GPU can open: the values of CUDA IPC, as torch names them."""

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
    """Answer to `AskTransfer`: transfer `number` of `communicator` has begun, with `parameters` in this order.

    If the engine holds another `communicator`, it first joins this one as rank 1 and up: at the file `meeting` in the
    run's private folder (gloo), or with NCCL's `unique_id`. With `memory` (CUDA IPC) nothing is joined or sent: the
    parameters are there, one after the other. Joining and transfer end within `deadline_s`.
    """

    communicator: int
    number: int
    deadline_s: float
    parameters: list[TransferParameter]
    meeting: str = ""
    unique_id: bytes = b""
    memory: DeviceMemory | None = None


@message(115, reply=TransferOffer)
class AskTransfer(Request, frozen=True, kw_only=True):
    """An engine asks for the weights of version (lineage, step), or, with `drill`, for the start-up drill's.

    `communicator` is that of this life of the engine, or 0 for none; `ranks` is the number of its receiving processes.
    Error missing: the trainer can no longer send that version. The shards are still available.
    """

    instance: int
    incarnation: int
    communicator: int
    ranks: int
    host_id: str
    lineage: int
    step: int
    drill: bool = False


@message(116, reply=Ack)
class EndTransfer(Request, frozen=True, kw_only=True):
    """The engine has all of transfer `number`, or (`failure`) gave it up, which ends the communicator."""

    instance: int
    incarnation: int
    communicator: int
    number: int
    failure: str = ""
