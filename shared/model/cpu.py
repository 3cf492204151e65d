"""How a process that computes uses a CPU: so many threads, and memory that it keeps. Before it loads a model, once."""

from __future__ import annotations

import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES = 256 << 20


def set_up(threads: int) -> None:
    """`threads` for torch, and freed memory is kept for what is allocated next (`shelf.give_back` returns it).

    By itself glibc returns what it has on top and gives every large array new pages, which the kernel clears: a
    twentieth of a trainer's time, a quarter where a virtual machine has to find them first; kept, 7 % more samples a
    second. What is set in the environment stands.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None or "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
