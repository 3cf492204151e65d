"""Outlives a launcher that was killed: ends the processes it started and removes the run's sockets and shared memory.

Started by the launcher as a bare script (`python -I -S guard.py SOCKETS SHM`), so it must import nothing but the
standard library. It reads `+PID` and `-PID` lines from its input; the end of the input is the launcher's death. It
inherits the lock on the run directory: a second launcher waits until nothing of the first is left.
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
"""Seconds to wait for the end of what was killed."""


class Left(NamedTuple):
    """A process that the launcher left behind."""

    descriptor: int
    limit_s: float
    """Seconds that it has to end by itself, as the supervisor says."""


def watch(lines: Iterable[str]) -> dict[int, Left]:
    """Read announcements until the launcher is gone; return the processes that it left behind, by pid."""
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
    """SIGTERM to all, SIGKILL to those that are still there when their limit is over; returns when all are gone."""
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
    """Forget the processes that end before `until`, with what they started."""
    while left and (remaining := until - time.monotonic()) > 0:
        gone, _, _ = select.select([each.descriptor for each in left.values()], [], [], remaining)
        for pid in [pid for pid, each in left.items() if each.descriptor in gone]:
            del left[pid]
            try:
                os.killpg(pid, signal.SIGKILL)  # what it started and left behind
            except ProcessLookupError:
                continue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    end(watch(sys.stdin))
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
