"""A gloo group of the trainer (rank 0) and the ranks of one engine, on the CPUs of one host. Must never listen outside
the host, nor wait for anybody past a deadline.

The ranks meet in a file of the run's private folder. It is no part of torch.distributed's default group: a process has
as many of these as it likes, and one that breaks takes nothing else with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, FileStore, ProcessGroupGloo

LOOPBACK = "lo"


class TransferLost(Exception):
    """The group is of no use any more: somebody is gone, or did not do its part in time. One line."""


class GlooGroup:
    """Blocks until all ranks are there. Raises TransferLost when they are not within `deadline_s`."""

    def __init__(self, meeting: Path, rank: int, ranks: int, *, deadline_s: float) -> None:
        """`meeting`: a file that nobody has met in before, to be kept until all have met (one may see that earlier than
        another); `rank` 0 sends, the others (of `ranks` in all) receive."""
        self._deadline_s = deadline_s
        gloo: Any = ProcessGroupGloo  # more than its stubs know
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=LOOPBACK)]
        options._timeout = timedelta(seconds=deadline_s)
        options._threads = 1
        store = FileStore(str(meeting), ranks)
        store.set_timeout(timedelta(seconds=deadline_s))
        try:
            self._group = gloo(store, rank, ranks, options)
        except RuntimeError as error:
            raise TransferLost(f"gloo group of {ranks} not formed within {deadline_s:g} s: {_line(error)}") from None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into everybody's `tensors`: contiguous, in host memory, the same on all ranks in number,
        shape and type. All of them within the deadline. Raises TransferLost: the group cannot be used again.
        """
        ends = time.monotonic() + self._deadline_s
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            if not tensor.numel():
                continue
            left = timedelta(seconds=max(ends - time.monotonic(), 1e-3))
            options.timeout = left
            try:
                self._group.broadcast([tensor.detach().reshape(-1).view(torch.uint8)], options).wait(left)
            except RuntimeError as error:
                raise TransferLost(_line(error)) from None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
