"""Restrictions that a process for users' code imposes on itself before it loads any of that code.

The service never relies on this process to exit on its own. The module does not import torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.rollout.user_code.frames import LENGTH
from services.rollout.user_code.keeper import run_subreaper

_LIKELY_VICTIM = b"700"
M = TypeVar("M", bound=msgspec.Struct)


class _Lossy(io.FileIO):
    """A stream that drops what cannot be written (for example, to a full disk), so that printing never makes a sample
    fail."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(memoryview(data))


def confine(descriptor: int) -> socket.socket | None:
    """Return the socket to the service, or None if the service is already gone.

    This process and everything that it starts end with the service.
    """
    if not run_subreaper(descriptor):
        return None
    os.set_inheritable(descriptor, False)
    Path("/proc/self/oom_score_adj").write_bytes(_LIKELY_VICTIM)  # the OOM killer kills this process before the engine
    os.dup2(2, 1)  # what users' code prints goes to standard error
    lossy = _Lossy(2, "w", closefd=False)
    sys.stdout = sys.stderr = io.TextIOWrapper(lossy, errors="backslashreplace", write_through=True)
    return socket.socket(fileno=descriptor)


def limit_memory(memory_bytes: int) -> None:
    """Allow this process to use `memory_bytes` more than it uses now.

    The limit applies to private writable memory (RLIMIT_DATA), because RLIMIT_AS also counts libraries mapped from
    files, which are shared. Shared mappings and files in /dev/shm are not counted. The same limit applies separately to
    each process that users' code starts.
    """
    held = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            held = int(line.split()[1]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory_bytes, most))


def grow_limit(more_bytes: int) -> None:
    """Change the limit by `more_bytes`, which may be negative, to allow for memory that is reserved but not used."""
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit + more_bytes, most))


def read(link: socket.socket, kind: type[M]) -> M | None:
    """Return the next message, or None if the service is gone."""
    head = link.recv(LENGTH.size, socket.MSG_WAITALL)
    body = link.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""
    return msgspec.msgpack.decode(body, type=kind) if body else None
