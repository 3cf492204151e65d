"""Implements the trainer's end (rank 0) of an NCCL communicator with the ranks of one engine, over libnccl's C
interface. Every wait has a deadline, which NCCL itself lacks.

torch's NCCL groups kill their process when a peer is gone, but a trainer must survive that. Moreover, vLLM must not be
imported into the training process. This module therefore calls a few functions of
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html directly. The communicator is non-blocking
(`ncclConfig_t.blocking` 0): calls are polled with `ncclCommGetAsyncError` and abandoned with `ncclCommAbort`. The other
end is vLLM's PyNcclCommunicator, which begins with an all-reduce of one element.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared.ranks.meeting import NCCL_INTERFACE, exactly
from shared.weights.gloo import TransferLost

UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM = 0
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""NCCL 2.14, the first version with `blocking`. libnccl sets later fields to their defaults."""
_POLL_S = 0.001
_SPIN_S = 0.0002
"""Seconds that a wait polls without pausing. A call for one tensor takes less; a version has hundreds of tensors."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def new_unique_id(interface: str) -> bytes:
    """Return the id by which the ranks of a new communicator find each other. Raises TransferLost without NCCL.

    NCCL then uses `interface` in this process, unless the environment already sets NCCL_SOCKET_IFNAME.
    """
    os.environ.setdefault(NCCL_INTERFACE, exactly(interface))
    made = _UniqueId()
    _check(_library(), _library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class NcclGroup:
    """A communicator that the first `broadcast` joins. Use it on one thread only. No other thread may abort it, because
    an abort frees memory that a polling thread reads."""

    def __init__(
        self, unique_id: bytes, ranks: int, *, device: str, deadline_s: float, given_up: threading.Event | None = None
    ) -> None:
        """`device` is the device of rank 0, such as `cuda:0`. Setting `given_up` ends all waits with TransferLost."""
        self._given_up = threading.Event() if given_up is None else given_up
        self._library = _library()
        self._cuda: Any = torch.cuda  # torch.cuda is partly untyped
        self._unique_id = _UniqueId.from_buffer_copy(unique_id)
        self._ranks = ranks
        self._device = torch.device(device)
        self._deadline_s = deadline_s
        self._communicator: ctypes.c_void_p | None = None
        self._stream: Any = None
        self.joined = False
        """Whether all ranks have joined."""

    def broadcast(self, chunks: Iterable[Sequence[Tensor]]) -> None:
        """Send the tensors of `chunks`, on any device, to all other ranks, after joining if necessary.

        A chunk is taken once the one before it has been sent, so only one chunk of copies exists at a time. Raises
        TransferLost, after aborting the communicator.
        """
        deadline = time.monotonic() + self._deadline_s
        try:
            with torch.cuda.device(self._device):
                if self._stream is None:
                    self._stream = self._cuda.Stream()
                with torch.cuda.stream(self._stream):
                    if self._communicator is None:
                        self._join(deadline)
                    for chunk in chunks:
                        # First all copies: one from host memory waits for the stream, and thus for a broadcast,
                        # without a deadline.
                        sent = [tensor.detach().to(self._device).contiguous() for tensor in chunk]
                        self._send(sent, deadline)
                        self._wait_for_stream(deadline)
                        del sent  # kept until here because the stream reads them
        except TransferLost:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the communicator, which ends all waits on it."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._library.ncclCommAbort(communicator)

    def _join(self, deadline: float) -> None:
        communicator = self._communicator = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), self._ranks, self._unique_id, 0, ctypes.byref(config)
        )
        self._wait(code, deadline, "join")
        one = torch.zeros(1, device=self._device)
        address = ctypes.c_void_p(one.data_ptr())
        self._call(deadline, "ncclAllReduce", address, address, ctypes.c_size_t(1), _DTYPES[one.dtype], _SUM)
        self._wait_for_stream(deadline)
        self.joined = True

    def _send(self, tensors: Sequence[Tensor], deadline: float) -> None:
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                raise TransferLost(f"NCCL does not support {tensor.dtype}; use weights: shards")
            if tensor.numel():
                address, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
                self._call(deadline, "ncclBroadcast", address, address, count, _DTYPES[tensor.dtype], 0)

    def _call(self, deadline: float, function: str, *arguments: object) -> None:
        if self._stream is None:
            raise TransferLost(f"{function}: no stream")
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        call = getattr(self._library, function)
        self._wait(call(*arguments, self._open_communicator(), stream), deadline, function)

    def _wait(self, code: int, deadline: float, what: str) -> None:
        state, began = ctypes.c_int(code), time.monotonic()
        while state.value == _IN_PROGRESS:
            _check(self._library, self._library.ncclCommGetAsyncError(self._open_communicator(), ctypes.byref(state)))
            self._pause(began, deadline, what, lambda: state.value != _IN_PROGRESS)
        _check(self._library, state.value)

    def _wait_for_stream(self, deadline: float) -> None:
        event, began = self._cuda.Event(), time.monotonic()
        event.record()
        while not event.query():
            state = ctypes.c_int()
            _check(self._library, self._library.ncclCommGetAsyncError(self._open_communicator(), ctypes.byref(state)))
            if state.value not in (_SUCCESS, _IN_PROGRESS):
                _check(self._library, state.value)
            self._pause(began, deadline, "broadcast", event.query)

    def _open_communicator(self) -> ctypes.c_void_p:
        if self._communicator is None:
            raise TransferLost("the communicator was aborted")
        return self._communicator

    def _pause(self, began: float, deadline: float, what: str, done: Callable[[], bool]) -> None:
        if not done():
            now = time.monotonic()
            if now > deadline:
                raise TransferLost(f"{what}: not done within {self._deadline_s:g} s")
            # NCCL has no event to wait for.
            if self._given_up.wait(0.0 if now < began + _SPIN_S else _POLL_S):
                raise TransferLost(f"{what}: given up")


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnccl.so.2")  # loaded by torch for CUDA
    except OSError as error:
        raise TransferLost(f"NCCL: {error}; route nccl needs torch for CUDA") from None


def _check(library: ctypes.CDLL, code: int) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise TransferLost(f"NCCL: {library.ncclGetErrorString(code).decode()}")
