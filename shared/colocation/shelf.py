"""Moves tensors off the device and back, bit for bit, to free their memory for a while, or frees it without keeping
their values.

On CUDA, the shelf is page-locked host memory, which stays allocated: copies between it and a GPU are fast and can
overlap with other work. On a CPU, where device and host share memory, it is a file, so that the memory is really freed.
Models and optimizers keep their tensor objects, whose storage is emptied and refilled in place.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shared.model import cpu

ALIGN = 512
"""Alignment of the pieces in bytes, as in torch's own GPU allocations."""


class LockedMemory:
    """One range of page-locked memory, divided into pieces. It stays allocated and locked as long as the object lives.

    `torch.empty(pin_memory=True)` rounds each allocation up to a power of two, which takes 1.9 times the bytes for the
    optimizer of a 7B-parameter model. Locking also costs more than a copy, so a range is worth keeping.
    """

    def __init__(self, sizes: Sequence[int], *, lock: bool = True) -> None:
        """`sizes` are in bytes. Without CUDA, `lock` must be false. Raises RuntimeError if locking fails."""
        self.sizes = list(sizes)
        self.nbytes = sum(map(_aligned, sizes))
        self._memory = mmap.mmap(-1, max(self.nbytes, 1))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if lock:
            status = _runtime().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(f"{self.nbytes} bytes of host memory cannot be page-locked: {status}")
            # The range must be unlocked while it is still mapped, so the finalizer keeps a reference to it.
            weakref.finalize(self, _unlock, whole)
        self.pieces: list[Tensor] = []
        """uint8 tensors of `sizes` bytes."""
        offset = 0
        for size in sizes:
            self.pieces.append(whole[offset : offset + size])
            offset += _aligned(size)


class Shelf:
    """A set of tensors that is either on the device or on the shelf. It belongs to the compute thread."""

    def __init__(self, file: Path, content: Literal["changes", "frozen"] = "changes") -> None:
        """`file` receives the bytes of CPU tensors; its folder is created if needed. `frozen` tensors are written once,
        and again after `renewed`."""
        self._file = file
        self._content = content
        self._written = False
        self._stored: list[tuple[torch.UntypedStorage, int]] = []
        self._locked: LockedMemory | None = None

    @property
    def holds(self) -> bool:
        """Whether the tensors are on the shelf."""
        return bool(self._stored)

    def put(self, tensors: Iterable[Tensor]) -> int:
        """Move the storages of `tensors` to the shelf, each one once, and return the number of bytes freed."""
        tensors = list(tensors)
        own_storages(tensors)
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = storage
        self._stored = [(storage, storage.nbytes()) for storage in storages.values()]
        if not self._written:
            self._write_file([storage for storage in storages.values() if storage.device.type == "cpu"])
            self._write_locked([storage for storage in storages.values() if storage.device.type != "cpu"])
            self._written = self._content == "frozen"
        for storage in storages.values():
            storage.resize_(0)
        give_back()
        return sum(size for _, size in self._stored)

    def take(self) -> int:
        """Move everything back into the same tensors and return the number of bytes. Raises OSError if the file is
        gone."""
        on_cpu = [(storage, size) for storage, size in self._stored if storage.device.type == "cpu"]
        if on_cpu:
            with self._file.open("rb") as file:
                for storage, size in on_cpu:
                    storage.resize_(size)
                    if file.readinto(_bytes(storage)) != size:
                        raise OSError(f"{self._file}: the file is shorter than the data written to it")
            if not self._written:
                self._file.unlink()
        on_device = [(storage, size) for storage, size in self._stored if storage.device.type != "cpu"]
        if on_device and self._locked is not None:
            for (storage, size), piece in zip(on_device, self._locked.pieces, strict=True):
                storage.resize_(size)
                _device_bytes(storage).copy_(piece, non_blocking=True)
            torch.cuda.synchronize()
        moved = sum(size for _, size in self._stored)
        self._stored = []
        return moved

    def renewed(self) -> None:
        """Record that frozen tensors have new values, so that the next `put` writes them again."""
        self._written = False

    def remove(self) -> None:
        """Delete the file and free the host memory. Tensors still on the shelf cannot be restored after this."""
        self._file.unlink(missing_ok=True)
        self._locked = None

    def _write_file(self, storages: list[torch.UntypedStorage]) -> None:
        if storages:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("wb") as file:
                for storage in storages:
                    file.write(_bytes(storage))

    def _write_locked(self, storages: list[torch.UntypedStorage]) -> None:
        if not storages:
            return
        sizes = [storage.nbytes() for storage in storages]
        if self._locked is None or self._locked.sizes != sizes:
            self._locked = None  # frees the old memory first
            self._locked = LockedMemory(sizes)
        for storage, piece in zip(storages, self._locked.pieces, strict=True):
            piece.copy_(_device_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Released:
    """Tensors that shared the same memory, and their shape, dtype and device."""

    tensors: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def release(tensors: Iterable[Tensor]) -> list[Released]:
    """Free the memory of `tensors`; their values are lost. After `restore`, tensors that shared memory do so again."""
    groups: dict[tuple[int, torch.Size], Released] = {}
    for tensor in tensors:
        key = (tensor.data_ptr(), tensor.shape)
        groups.setdefault(key, Released([], tensor.shape, tensor.dtype, tensor.device)).tensors.append(tensor)
    for group in groups.values():
        for tensor in group.tensors:
            tensor.data = torch.empty(0, dtype=group.dtype, device=group.device)
    return list(groups.values())


def restore(released: Iterable[Released]) -> None:
    """Allocate uninitialized memory for the tensors that were released."""
    for group in released:
        data = torch.empty(group.shape, dtype=group.dtype, device=group.device)
        for tensor in group.tensors:
            tensor.data = data


def give_back() -> None:
    """Return free memory to the system. Otherwise, the C library keeps freed memory, and torch keeps all its GPU
    allocations."""
    torch.cuda.empty_cache()  # a no-op without CUDA
    cpu.give_back()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank, without a copy."""
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _unlock(whole: Tensor) -> None:
    _runtime().cudaHostUnregister(whole.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _device_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage as a writable view. The view is not a numpy array, because a storage that is
    shared with numpy cannot be resized."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def own_storages(tensors: Iterable[Tensor]) -> None:
    """Copy tensors whose memory belongs to a mapped file or to numpy into memory that can be freed."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor) and not tensor.untyped_storage().resizable():
            copies.setdefault(tensor.data_ptr(), tensor.data.clone())
            tensor.data = copies[tensor.data_ptr()]
