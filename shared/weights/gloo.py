"""A gloo group of the trainer (rank 0) and the ranks of one engine, on CPUs. Every wait has a deadline.

The group is independent of torch.distributed's default group: a process may have several, and the failure of one does
not affect the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo

from shared.ranks.meeting import Meeting
from shared.ranks.process_group import open_store


class TransferLost(Exception):
    """The group is unusable because a rank is gone or late. The message is one line."""


class GlooGroup:
    """A group whose constructor blocks until all ranks have joined."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int, *, deadline_s: float) -> None:
        """`meeting` uses a new file, which must exist until all ranks know that all have joined, or a port on rank 0.
        Rank 0 sends and the other ranks receive.

        Raises TransferLost if not all ranks join within `deadline_s`.
        """
        self._deadline_s = deadline_s
        gloo: Any = ProcessGroupGloo  # its stubs are incomplete
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=meeting.interface)]
        options._timeout = limit = timedelta(seconds=deadline_s)
        options._threads = 1
        try:
            self._group = gloo(open_store(meeting, ranks, limit), rank, ranks, options)
        except RuntimeError as error:
            raise TransferLost(
                f"gloo group of {ranks} not formed within {deadline_s:g} s: {_first_line(error)}"
            ) from None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into the `tensors` of all ranks. They must be contiguous, in host memory, with the same
        number, shapes and dtypes on all ranks. The deadline applies to all tensors together.

        Raises TransferLost, after which the group is unusable.
        """
        deadline = time.monotonic() + self._deadline_s
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            if not tensor.numel():
                continue
            left = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
            options.timeout = left
            try:
                self._group.broadcast([tensor.detach().reshape(-1).view(torch.uint8)], options).wait(left)
            except RuntimeError as error:
                raise TransferLost(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
