"""Runs GPU work that must neither wait for the training that other threads issue, nor be waited for by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """A CUDA stream of its own on each device, created when it is first needed. On a CPU, it does nothing.

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
