"""The trainer's end (rank 0) of an NCCL communicator with the ranks of one engine, over libnccl's C interface. Must
never wait for anybody past a deadline: NCCL has none of its own.

torch's NCCL groups end their process when a peer is gone, which a trainer must survive, and vLLM must not be imported
beside training; hence the few functions of https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html used
here. The communicator does not block (`ncclConfig_t.blocking` 0): every call is waited for with `ncclCommGetAsyncError`
and given up with `ncclCommAbort`. The other end is vLLM's PyNcclCommunicator, which begins with the sum of one element.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shared.transfer.gloo import LOOPBACK, TransferLost

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
"""2.14 was the first with `blocking`; libnccl fills in what came later."""
_POLL_S = 0.001


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def new_unique_id() -> bytes:
    """What the ranks of a new communicator need to find each other. Raises TransferLost without NCCL."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)  # both ends are on one host: nothing listens outside it
    made = _UniqueId()
    _check(_library(), _library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class NcclGroup:
    """Not joined yet: `broadcast` does that, on the thread that it is called on. `abort` may come from another one."""

    def __init__(self, unique_id: bytes, ranks: int, *, device: str, deadline_s: float) -> None:
        """`device`: of rank 0, as `cuda:0`."""
        self._library = _library()
        self._cuda: Any = torch.cuda  # parts of it are not typed
        self._unique_id = _UniqueId.from_buffer_copy(unique_id)
        self._ranks = ranks
        self._device = torch.device(device)
        self._deadline_s = deadline_s
        self._communicator: ctypes.c_void_p | None = None
        self._stream: Any = None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`, from wherever they are, to all other ranks, joining first. Raises TransferLost: the communicator
        is aborted."""
        ends = time.monotonic() + self._deadline_s
        try:
            with torch.cuda.device(self._device):
                if self._stream is None:
                    self._stream = self._cuda.Stream()
                with torch.cuda.stream(self._stream):
                    if self._communicator is None:
                        self._join(ends)
                    sent = [self._send(tensor, ends) for tensor in tensors]
                    self._until_done(ends)
                    del sent  # not before: the stream reads them
        except TransferLost:
            self.abort()
            raise

    def abort(self) -> None:
        """Whatever waits on the communicator ends."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._library.ncclCommAbort(communicator)

    def _join(self, ends: float) -> None:
        communicator = self._communicator = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), self._ranks, self._unique_id, 0, ctypes.byref(config)
        )
        self._wait(code, ends, "join")
        one = torch.zeros(1, device=self._device)
        address = ctypes.c_void_p(one.data_ptr())
        self._call(ends, "ncclAllReduce", address, address, ctypes.c_size_t(1), _DTYPES[one.dtype], _SUM)
        self._until_done(ends)

    def _send(self, tensor: Tensor, ends: float) -> Tensor:
        if tensor.dtype not in _DTYPES:
            raise TransferLost(f"NCCL has no {tensor.dtype}; use weights: shards")
        there = tensor.detach().to(self._device).contiguous()
        if there.numel():
            address = ctypes.c_void_p(there.data_ptr())
            self._call(ends, "ncclBroadcast", address, address, ctypes.c_size_t(there.numel()), _DTYPES[there.dtype], 0)
        return there

    def _call(self, ends: float, function: str, *arguments: object) -> None:
        if self._stream is None:
            raise TransferLost(f"{function}: no stream")
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        call = getattr(self._library, function)
        self._wait(call(*arguments, self._held(), stream), ends, function)

    def _wait(self, code: int, ends: float, what: str) -> None:
        state = ctypes.c_int(code)
        while state.value == _IN_PROGRESS:
            _check(self._library, self._library.ncclCommGetAsyncError(self._held(), ctypes.byref(state)))
            self._in_time(ends, what, lambda: state.value != _IN_PROGRESS)
        _check(self._library, state.value)

    def _until_done(self, ends: float) -> None:
        event = self._cuda.Event()
        event.record()
        while not event.query():
            state = ctypes.c_int()
            _check(self._library, self._library.ncclCommGetAsyncError(self._held(), ctypes.byref(state)))
            if state.value not in (_SUCCESS, _IN_PROGRESS):
                _check(self._library, state.value)
            self._in_time(ends, "broadcast", event.query)

    def _held(self) -> ctypes.c_void_p:
        if self._communicator is None:
            raise TransferLost("the communicator was aborted")
        return self._communicator

    def _in_time(self, ends: float, what: str, done: Callable[[], bool]) -> None:
        if not done():
            if time.monotonic() > ends:
                raise TransferLost(f"{what}: not done within {self._deadline_s:g} s")
            time.sleep(_POLL_S)  # NCCL offers nothing to wait on


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnccl.so.2")  # torch for CUDA has loaded it
    except OSError as error:
        raise TransferLost(f"NCCL: {error}; route nccl needs torch for CUDA") from None


def _check(library: ctypes.CDLL, code: int) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise TransferLost(f"NCCL: {library.ncclGetErrorString(code).decode()}")
