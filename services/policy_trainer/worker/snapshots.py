"""Keeps snapshots of one rank's training state in shared memory, from which a later life of the rank continues.

A rank fills two files alternately, so that one of them is always whole. Each is a block file (`proto.blockfile`) with
the single task `state/<lineage>/<step>`. A file's header is cleared before its data is replaced, and is written after
the new data, so a file with a valid header is sealed. `read` verifies the checksums of the data. The files are in the
run's folder in shared memory. They outlive the trainer's processes, but not the launcher or the host.

The methods block. They are not called from two threads at once. Only methods that use tensors import torch, so that a
rank can report its snapshots while it starts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
import xxhash

from proto import blockfile
from proto.blockfile import HEADER_BYTES, BlockLayout, Table
from proto.errors import WireError
from proto.messages import ErrorCode, HeldSnapshot
from proto.tensors import Array
from shared.dataplane.write import copy_block
from shared.ranks.layout import RankPlace
from shared.rpc.errors import RpcError

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "state"


class Snapshots:
    """The two files of one rank, or none. A rank in another layout does not see them."""

    def __init__(self, folder: Path | None, place: RankPlace) -> None:
        """`folder` is None if the topology asks for no snapshots."""
        layout = place.layout
        ranks = f"{layout.world_size}-tp{layout.tp}-pp{layout.pp}-cp{layout.cp}-ep{layout.ep}"
        names = (f"rank-{place.rank}-of-{ranks}.{index}" for index in range(2))
        self._files = [] if folder is None else [folder / name for name in names]
        self._newest = self._files[0] if self._files else None
        self._mapped: dict[Path, Array] = {}

    def held(self) -> list[HeldSnapshot]:
        """Return the sealed snapshots."""
        return [held for file in self._files if (held := _content(self._table(file))) is not None]

    def keep(self, lineage: int, step: int, state: Callable[[], Mapping[str, Tensor]]) -> float:
        """Take a snapshot of the state after `step`, which `state` returns. If that fails, stop taking snapshots: the
        rank continues to train without them.

        Return the processor time that this took, in seconds.
        """
        if not self._files:
            return 0.0
        began = time.thread_time()
        try:
            self.take(lineage, step, state())
        except (OSError, WireError) as error:
            log = structlog.get_logger("worker")
            log.warning("snapshots turned off, so a killed trainer returns to its checkpoint", error=str(error))
            self.remove()
            self._files = []
        return time.thread_time() - began

    def take(self, lineage: int, step: int, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the file that does not hold the newest snapshot. Raises OSError if there is no room."""
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        layout = BlockLayout(
            [(f"{_STATE}/{lineage}/{step}", 0, {name: _memory(tensor) for name, tensor in on_host.items()})]
        )
        file = next(candidate for candidate in self._files if candidate != self._newest)
        target = self._room(file, layout.file_bytes)
        _clear(target)
        copy_block(target, layout)
        self._newest = file

    def read(self, lineage: int, step: int) -> dict[str, Tensor]:
        """Return the tensors of a snapshot. They change when its file is filled again.

        Raises RpcError: missing if there is no such snapshot, or conflict if a tensor differs from what was written.
        """
        from shared.tensors_torch import to_torch

        for file in self._files:
            table = self._table(file)
            if table is None or _content(table) != HeldSnapshot(lineage=lineage, step=step):
                continue
            mapped, tensors = self._mapped[file], {}
            for shard in table.shards(0):
                data = mapped[shard.offset : shard.offset + shard.nbytes]
                if xxhash.xxh3_64_intdigest(data.data) != shard.checksum:
                    raise RpcError(
                        ErrorCode.CONFLICT, f"snapshot {file}: {shard.key} is not what was written (checksum)"
                    )
                tensors[shard.key] = to_torch(data.view(shard.dtype.numpy).reshape(shard.shape))
            return tensors
        raise RpcError(ErrorCode.MISSING, f"snapshot of step {step}, lineage {lineage}: this rank has no such file")

    def keep_only(self, lineage: int = -1, step: int = -1) -> None:
        """Discard all snapshots except that of `step` under `lineage`, because the others were not trained from the
        state that is now loaded."""
        for file in self._files:
            content = _content(self._table(file))
            if content == HeldSnapshot(lineage=lineage, step=step):
                self._newest = file
            elif content is not None:
                _clear(self._mapped[file])

    def remove(self) -> None:
        """Delete the files and free their memory."""
        self._mapped.clear()
        for file in self._files:
            file.unlink(missing_ok=True)

    def _table(self, file: Path) -> Table | None:
        """Map a sealed file and return its header and table, or return None for any other file."""
        if file not in self._mapped:
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                size = os.fstat(descriptor).st_size
                if size < HEADER_BYTES:
                    return None
                self._mapped[file] = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            finally:
                os.close(descriptor)
        mapped = self._mapped[file]
        try:
            return blockfile.parse(mapped.data, mapped.nbytes)
        except WireError:
            return None

    def _room(self, file: Path, nbytes: int) -> Array:
        """Return a mapping of exactly `nbytes` of `file`, all of them allocated, because writing to a hole could raise
        SIGBUS."""
        mapped = self._mapped.get(file)
        if mapped is not None and mapped.nbytes == nbytes:
            return mapped
        self._mapped.pop(file, None)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._mapped[file] = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        finally:
            os.close(descriptor)
        return self._mapped[file]


def _content(table: Table | None) -> HeldSnapshot | None:
    """Return the snapshot that a file holds, or None."""
    if table is None:
        return None
    _, lineage, step = table.task_ids[0].split("/")
    return HeldSnapshot(lineage=int(lineage), step=int(step))


def _clear(mapped: Array) -> None:
    """Remove the seal from a file."""
    mapped[:HEADER_BYTES] = 0


def _memory(tensor: Tensor) -> Array:
    """Return an array over the memory of a contiguous CPU tensor. `Tensor.numpy` would keep the memory from being
    freed."""
    from shared.tensors_torch import numpy_dtype

    if not tensor.nbytes:
        return np.empty(tensor.shape, numpy_dtype(tensor))
    data = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    return np.frombuffer(data, numpy_dtype(tensor)).reshape(tensor.shape)
