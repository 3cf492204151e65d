"""The parent of a process that runs users' code. It kills all descendants when that process or the service ends.

This includes descendants that have their own sessions or were forked twice. The keeper runs no user code and ends with
its child. As a subreaper (prctl(2)) it adopts descendants whose parents are gone, so none can leave its tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WAKES = 1 << 10
_AGAIN_S = 0.02
KILL_LIMIT_S = 5.0
"""Maximum seconds spent killing descendants. Any that remain belong to another user or are waiting for a device that
does not respond."""


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
    found: list[int] = []
    below = [pid]
    while below:
        below = [each for parent in below for each in children.get(parent, ())]
        found += below
    return found
