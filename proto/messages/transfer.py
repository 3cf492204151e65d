"""Messages for sending weights over collectives, between an engine and rank 0 of the trainer.

Values that a library would exchange on its own (a rendezvous point, NCCL's unique id) are typed fields here.
"""

from __future__ import annotations

import msgspec

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


class TransferParameter(Record, frozen=True, array_like=True):
    """One tensor of a transfer."""

    name: str  # name of the parameter
    dtype: str  # name of the element type (section 5)
    shape: list[int]  # dimensions


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory that another process on the same GPU can open: the CUDA IPC handle and offsets that torch exports for
    it, the GPU's UUID and the size."""

    gpu: str  # UUID of the GPU
    nbytes: int  # size of the memory, in bytes
    handle: bytes  # handle of the storage
    storage_bytes: int  # bytes of the storage
    storage_offset: int  # offset of the memory in the storage, in bytes
    counter: bytes  # handle of the reference counter
    counter_offset: int  # offset of the reference counter
    event: bytes  # handle of the event after which the memory may be read
    event_sync: bool  # whether to wait for that event


@message(114)
class TransferOffer(Message, frozen=True, kw_only=True):
    """A transfer has begun. An engine that holds another communicator first joins this one, as rank 1 and higher."""

    communicator: int  # number of the communicator
    number: int  # number of the transfer in the communicator
    deadline_s: float  # seconds within which the ranks must have joined and the transfer must be complete
    parameters: list[TransferParameter]  # all tensors of the version, in the order in which they are sent
    first: int = 0  # index of the first tensor that this transfer carries
    left: int = 0  # number of tensors at the end that it does not carry; the engine asks for them next
    meeting: str = ""  # gloo on one host: the file through which ranks join, in the run's private folder
    store: str = ""  # gloo between hosts: the trainer's address `HOST:PORT` at which ranks join
    unique_id: bytes = b""  # NCCL: the id with which ranks join
    memory: DeviceMemory | None = None
    """CUDA IPC: nothing is joined or sent; the tensors are in this memory, one after the other."""


@message(115, reply=TransferOffer)
class AskTransfer(Request, frozen=True, kw_only=True):
    """An engine asks for the weights of a version over a collective.

    Errors:
        conflict: this incarnation of the engine has been replaced by a later one.
        missing: the trainer cannot send that version, or cannot send it to this engine, or no transfer of it begins
            with tensor `first`. The version's shards remain available.
    """

    instance: int
    incarnation: int
    communicator: int  # the communicator of this incarnation of the engine, 0 for none
    ranks: int  # number of the engine's processes that receive the weights
    host_id: str  # as in `Register`
    lineage: int
    step: int  # the policy version
    drill: bool = False  # send the weights of the start-up drill instead of a version
    first: int = 0  # index of the first tensor to send; the engine has received those before it


@message(116, reply=Ack)
class EndTransfer(Request, frozen=True, kw_only=True):
    """The engine has received the whole transfer, or has abandoned it, which ends the communicator."""

    instance: int
    incarnation: int
    communicator: int  # number of the communicator
    number: int  # number of the transfer
    failure: str = ""  # the reason for abandoning the transfer; empty: the whole transfer arrived
