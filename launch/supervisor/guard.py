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

DRAIN_LIMIT_S = 15.0
"""As in `launch.supervisor.state`: after this long without an end, SIGKILL."""


def watch(lines: Iterable[str]) -> dict[int, int]:
    """Read announcements until the launcher is gone; return {pid: pidfd} of the processes that it left behind."""
    left: dict[int, int] = {}
    for line in lines:
        pid = int(line[1:])
        if line[0] == "+":
            try:
                left[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        elif pid in left:
            os.close(left.pop(pid))
    return left


def end(left: dict[int, int], limit_s: float) -> None:
    """SIGTERM to all, SIGKILL after `limit_s` seconds to those that are still there; returns when all are gone."""
    for number, wait_s in ((signal.SIGTERM, limit_s), (signal.SIGKILL, limit_s)):
        for descriptor in left.values():
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                continue
        until = time.monotonic() + wait_s
        while left and (remaining := until - time.monotonic()) > 0:
            gone, _, _ = select.select(list(left.values()), [], [], remaining)
            for pid in [pid for pid, descriptor in left.items() if descriptor in gone]:
                del left[pid]
                try:
                    os.killpg(pid, signal.SIGKILL)  # what it started and left behind
                except ProcessLookupError:
                    continue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    end(watch(sys.stdin), DRAIN_LIMIT_S)
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
