"""Provides a version's tensors for the transfer to an engine, in chunks of bounded size.

While the trainer's own weights are still this version, copies of them are sent from GPU to GPU. Afterwards, the weights
in the store are sent. Training waits at most for the copy of one chunk, never for an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proto.messages import TransferParameter
from services.policy_trainer.worker.weights.side_stream import SideStream
from shared.weights import table

CHUNK_BYTES = 256 * 1024**2
"""Maximum size, in bytes, of a chunk that is not a single tensor. A transfer takes up the memory of one chunk in
addition to the weights."""
Version = tuple[int, int]
"""Lineage and step."""


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
        here = bool(weights) and all(each.device.type == self._kind for each in weights.values())
        with self._lock:
            self._version, self._weights = (version, weights) if here else (None, {})

    def withdraw(self) -> None:
        """Prevent new copies, and return once no copy is in progress, so that the weights can be changed."""
        with self._lock:
            self._version, self._weights = None, {}

    def parameters(self, version: Version) -> list[TransferParameter] | None:
        """Return the parameter table of `version`, or None if `version` is not here."""
        with self._lock:
            return table.described(self._weights) if version == self._version else None

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
        for chunk in table.in_parts(self.parameters, CHUNK_BYTES):
            names = [each.name for each in self.parameters[chunk]]
            found = self.live.copies(self.version, names, device)
            yield [self.stored()[name] for name in names] if found is None else found
