"""Outlives a killed launcher: stops the launcher's processes and removes the run's sockets and shared memory.

The launcher starts it as a bare script (`python -I -S guard.py SOCKETS SHM`), so it imports nothing but the standard
library. It reads `+PID SECONDS` and `-PID` lines from its input, which ends when the launcher dies. It inherits the
lock on the run directory, so that a second launcher waits until no process of the first one is left.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

KILLED_S = 15.0
"""Maximum time, in seconds, to wait for killed processes to exit."""


class Left(NamedTuple):
    """A process that the launcher left behind."""

    descriptor: int
    limit_s: float
    """Time, in seconds, within which the process must exit after SIGTERM, as announced by the supervisor."""


def watch(lines: Iterable[str]) -> dict[int, Left]:
    """Read announcements until the launcher is gone. Return the processes that the launcher left behind, by pid."""
    left: dict[int, Left] = {}
    for line in lines:
        pid, *limit_s = line[1:].split()
        if line[0] == "+":
            try:
                left[int(pid)] = Left(os.pidfd_open(int(pid)), float(limit_s[0]))
            except ProcessLookupError:
                continue
        elif int(pid) in left:
            os.close(left.pop(int(pid)).descriptor)
    return left


def end(left: dict[int, Left]) -> None:
    """Send SIGTERM to all processes, then SIGKILL to each that is still alive after its limit.

    Return when all have ended, or `KILLED_S` seconds after the last SIGKILL.
    """
    begun = time.monotonic()
    _signal(left.values(), signal.SIGTERM)
    for limit_s in sorted({each.limit_s for each in left.values()}):
        _wait(left, begun + limit_s)
        _signal([each for each in left.values() if each.limit_s <= limit_s], signal.SIGKILL)
    _wait(left, time.monotonic() + KILLED_S)


def _signal(processes: Iterable[Left], number: signal.Signals) -> None:
    for process in processes:
        try:
            signal.pidfd_send_signal(process.descriptor, number)
        except ProcessLookupError:
            continue


def _wait(left: dict[int, Left], until: float) -> None:
    """Forget the processes that exit before `until`, and kill the processes that they started."""
    while left and (remaining := until - time.monotonic()) > 0:
        gone, _, _ = select.select([each.descriptor for each in left.values()], [], [], remaining)
        for pid in [pid for pid, each in left.items() if each.descriptor in gone]:
            del left[pid]
            try:
                os.killpg(pid, signal.SIGKILL)  # processes that it started and left behind
            except ProcessLookupError:
                continue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard ends when the launcher does
    end(watch(sys.stdin))
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
