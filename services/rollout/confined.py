"""The child's end of a process that runs users' code: what it gives up before it loads any of it. Must never be trusted
to end itself, and must never import torch.
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

from services.rollout.keeper import keep
from services.rollout.user_frames import LENGTH

_LIKELY_VICTIM = b"700"
M = TypeVar("M", bound=msgspec.Struct)


class _Lossy(io.FileIO):
    """What cannot be printed (a full disk) is lost: it must never cost a sample."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(memoryview(data))


def confine(descriptor: int) -> socket.socket | None:
    """The socket to the service, with which this process and all that it starts die; None when the service is gone
    already."""
    if not keep(descriptor):
        return None
    os.set_inheritable(descriptor, False)
    Path("/proc/self/oom_score_adj").write_bytes(_LIKELY_VICTIM)  # before the engine, if it comes to that
    os.dup2(2, 1)  # what a function prints is for people
    lossy = _Lossy(2, "w", closefd=False)
    sys.stdout = sys.stderr = io.TextIOWrapper(lossy, errors="backslashreplace", write_through=True)
    return socket.socket(fileno=descriptor)


def limit_memory(memory_bytes: int) -> None:
    """Let this process take `memory_bytes` beyond what it holds now.

    Limits private writable memory (RLIMIT_DATA): libraries mapped from files, which RLIMIT_AS counts, are shared. Not
    counted are shared mappings and files in /dev/shm; a process that users' code starts has the same limit again, its
    own.
    """
    held = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            held = int(line.split()[1]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory_bytes, most))


def grow_limit(more_bytes: int) -> None:
    """Move the limit by `more_bytes`, which may be negative: for what is reserved and not used."""
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit + more_bytes, most))


def read(link: socket.socket, kind: type[M]) -> M | None:
    """The next message, None when the service is gone."""
    head = _exactly(link, LENGTH.size)
    body = _exactly(link, LENGTH.unpack(head)[0]) if head else b""
    return msgspec.msgpack.decode(body, type=kind) if body else None


def _exactly(link: socket.socket, count: int) -> bytes:
    """`count` bytes, or none when the service is gone."""
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
