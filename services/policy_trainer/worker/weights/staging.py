"""Holds the weights of a version in host memory, from which they are put into a store."""

from __future__ import annotations

from torch import Tensor

from proto.tensors import Array
from services.policy_trainer.worker.weights.side_stream import SideStream
from shared.colocation.locked import LockedMemory
from shared.tensors_torch import to_numpy


class Staging:
    """Copies weights from a GPU into page-locked memory, which it keeps from version to version.

    Any thread may call it, but only one at a time. The arrays of a version are valid until the next call.
    """

    def __init__(self) -> None:
        self._locked: LockedMemory | None = None
        self._stream = SideStream()

    def arrays(self, weights: dict[str, Tensor]) -> dict[str, Array]:
        """Return the weights by name, bit for bit unchanged. Arrays of tensors in host memory share that memory."""
        on_device = {name: tensor for name, tensor in weights.items() if tensor.device.type != "cpu"}
        if not on_device:
            return {name: to_numpy(tensor) for name, tensor in weights.items()}
        sizes = [tensor.nbytes for tensor in on_device.values()]
        if self._locked is None or self._locked.sizes != sizes:
            self._locked = None  # frees the old memory first
            self._locked = LockedMemory(sizes)
        host = dict(weights)
        with self._stream.after_training(next(iter(on_device.values())).device):
            for (name, tensor), piece in zip(on_device.items(), self._locked.pieces, strict=True):
                host[name] = piece.view(tensor.dtype).view(tensor.shape)
                host[name].copy_(tensor, non_blocking=True)
        return {name: to_numpy(tensor) for name, tensor in host.items()}
