"""Restrictions that a process for users' code imposes on itself before it loads any of that code, and its keeper.

The keeper is the parent of that process. It kills all descendants when the process or the service ends, including those
that have their own sessions or were forked twice: as a subreaper (prctl(2)) it adopts descendants whose parents are
gone, so none can leave its tree. It runs no user code and ends with its child. The service never relies on the process
to exit on its own. The module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from services.rollout.user_code.frames import LENGTH

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WAKES = 1 << 10
_AGAIN_S = 0.02
KILL_LIMIT_S = 5.0
"""Maximum seconds spent killing descendants. Any that remain belong to another user or are waiting for a device that
does not respond."""
_LIKELY_VICTIM = b"700"
_ADDRESS_CHARS = 100
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


class ConnectionLeftOut(BaseException):
    """A connection was not made. This is no `Exception`, because functions handle those by trying again."""


class Offline:
    """Ends whatever connects to a server, by Python's sockets, from now until the process ends.

    Programs that the process starts, and libraries with sockets of their own, are not affected.
    """

    def __init__(self) -> None:
        self._address = ""
        sys.addaudithook(self._audit)

    def taken(self) -> str:
        """Return the address to which the last connection since the previous call was not made, or an empty string."""
        address, self._address = self._address, ""
        return address

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        address: Any = None
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            address = arguments[1]
        elif event == "socket.getaddrinfo" and arguments[0]:
            address = arguments[:2]
        if isinstance(address, tuple):  # the address of a socket of this machine alone is a path
            self._address = ":".join(str(part) for part in address[:2])[:_ADDRESS_CHARS]
            raise ConnectionLeftOut(self._address)


def limit_memory(memory_bytes: int) -> None:
    """Allow this process to use `memory_bytes` more than it uses now.

    The limit applies to private writable memory (RLIMIT_DATA), because RLIMIT_AS also counts libraries mapped from
    files, which are shared. Shared mappings and files in /dev/shm are not counted. The same limit applies separately to
    each process that users' code starts.
    """
    used = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            used = int(line.split()[1]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, most))


def grow_limit(more_bytes: int) -> None:
    """Change the limit by `more_bytes`, which may be negative, to allow for memory that is reserved but not used."""
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit + more_bytes, most))


def read(link: socket.socket, kind: type[M]) -> M | None:
    """Return the next message, or None if the service is gone."""
    head = link.recv(LENGTH.size, socket.MSG_WAITALL)
    body = link.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""
    return msgspec.msgpack.decode(body, type=kind) if body else None


def run_subreaper(descriptor: int) -> bool:
    """Fork, and continue as the child of this process, which becomes its keeper. Return False if the service is gone.

    `descriptor` is the socket to the service, whose other end closes with the service. The keeper ends as the child
    does: by the same signal or with the same status. Call this before any thread exists.
    """
    libc = ctypes.CDLL(None)
    service = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != service:
        return False
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    keeper = os.getpid()
    child = os.fork()
    if child:
        try:
            _stay(child, descriptor, woken, asked)
        finally:
            os._exit(1)  # never return into users' code
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    os.setsid()  # a function that signals its process group must not reach the keeper
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == keeper


def _stay(child: int, descriptor: int, woken: int, asked: list[int]) -> NoReturn:
    """Wait until the child or service ends, or SIGTERM arrives. Then kill all descendants and exit as the child did."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(descriptor, 0)  # only POLLHUP, because the data is for the child
    status: int | None = None
    while status is None and not asked and not any(event & ~select.POLLIN for _, event in poll.poll()):
        os.read(woken, _WAKES)
        status = _reap(child)
    until = time.monotonic() + KILL_LIMIT_S
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if select.select([woken], [], [], _AGAIN_S)[0]:
            os.read(woken, _WAKES)
        ended = _reap(child)
        status = ended if status is None else status
    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(child: int) -> int | None:
    """Reap processes that have ended. Return the wait status of `child` if that process is among them."""
    status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, including zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                # The format is `pid (comm) state ppid ...`, and comm may contain anything.
                parent = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1]
                children[int(parent)].append(int(entry))
    pids: list[int] = []
    below = [pid]
    while below:
        below = [child for parent in below for child in children.get(parent, ())]
        pids += below
    return pids
