"""How a process that computes uses a CPU: so many threads, and memory that it keeps. Before it loads a model, once."""

from __future__ import annotations

import ctypes
import os
import threading

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES, _LITTLE_BYTES = 256 << 20, 128 << 10
_LIBC = ctypes.CDLL(None)
_IS_GLIBC = hasattr(_LIBC, "mallopt") and hasattr(_LIBC, "malloc_trim")
if _IS_GLIBC:
    _LIBC.malloc.restype, _LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    _LIBC.free.restype, _LIBC.free.argtypes = None, [ctypes.c_void_p]
_keeps = threading.Event()
"""Whether this process was set up to keep memory."""


def set_up(threads: int) -> None:
    """`threads` for torch, and freed memory is kept for what is allocated next, until `give_back`.

    By itself glibc returns what it has on top and gives every large array new pages, which the kernel clears: a
    twentieth of a trainer's time, a quarter where a virtual machine has to find them first; kept, 7 % more samples a
    second. Either of glibc's two variables for it, set in the environment, stands.
    """
    torch.set_num_threads(threads)
    if _IS_GLIBC and not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _keeps.set()


def give_back() -> None:
    """Return what is free of this thread's memory, and what malloc_trim finds of others'.

    That one leaves alone what lies on top of a thread's heap, which only a `free` of that thread looks at.
    """
    if _keeps.is_set():
        _LIBC.mallopt(_M_TRIM_THRESHOLD, _LITTLE_BYTES)
        _LIBC.free(_LIBC.malloc(_LITTLE_BYTES))
        _LIBC.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    if _IS_GLIBC:
        _LIBC.malloc_trim(0)
