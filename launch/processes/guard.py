"""Outlives a killed launcher: stops the launcher's processes and removes the run's sockets and shared memory.

Until then, it limits the size of the files to which the processes print.

The launcher starts it without site packages (`python -S -P -m launch.processes.guard SOCKETS SHM LOGS`), so it imports
only the standard library and modules that do the same. It reads `+PID SECONDS` and `-PID` lines from its input, which
ends when the launcher dies. It inherits the lock on the run directory, so that a second launcher waits until no process
of the first one is left.

The processes print to files and not to pipes: if the reader of a pipe is stopped or killed, a process that prints
blocks or fails. Nor can the processes limit these files themselves, because users' code and the programs that it starts
write to the same descriptors.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shared import bounded_file

KILLED_S = 15.0
"""Maximum time, in seconds, to wait for killed processes to exit."""
OUTPUT_SUFFIX = ".out"
OUTPUTS_EVERY_S = 0.1
"""Seconds between two checks of the sizes of the output files. In this time, a process can print about 100 MB."""


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
    for limit_s in sorted({process.limit_s for process in left.values()}):
        _wait(left, begun + limit_s)
        _signal([process for process in left.values() if process.limit_s <= limit_s], signal.SIGKILL)
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
        gone, _, _ = select.select([process.descriptor for process in left.values()], [], [], remaining)
        for pid in [pid for pid, process in left.items() if process.descriptor in gone]:
            del left[pid]
            try:
                os.killpg(pid, signal.SIGKILL)  # processes that it started and left behind
            except ProcessLookupError:
                continue


def limit_outputs(logs: Path, ended: threading.Event) -> None:
    """Cut the output files in `logs` that exceed the limit of `bounded_file`, until `ended` is set and once more."""
    last = False
    while not last:
        last = ended.wait(OUTPUTS_EVERY_S)
        with suppress(OSError):  # the folder is gone
            for entry in os.scandir(logs):
                with suppress(OSError):  # the file is gone, or the disk fails
                    if entry.name.endswith(OUTPUT_SUFFIX) and entry.stat().st_size > bounded_file.LIMIT_BYTES:
                        bounded_file.cut(Path(entry.path), bounded_file.LIMIT_BYTES)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard ends when the launcher does
    *volatile, logs = sys.argv[1:]
    ended = threading.Event()
    limiting = threading.Thread(target=limit_outputs, args=(Path(logs), ended))
    limiting.start()
    try:
        end(watch(sys.stdin))
    finally:
        ended.set()
        limiting.join()
    for folder in volatile:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
