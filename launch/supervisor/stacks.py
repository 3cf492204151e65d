"""Makes a hung process write the stacks of all its threads, and copies them into its log before it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog

from launch.supervisor.plan import SUPERVISOR, Key
from shared.rundir import RunDir

LIMIT_S = 1.0
"""Maximum seconds to wait for the stacks. To write them, the process needs processor time, but not
the interpreter lock."""
LIMIT_BYTES = 128 << 10
_POLL_S = 0.05


async def log_stacks(run: RunDir, key: Key, pid: int, cause: str, ask: Callable[[], None]) -> None:
    """Call `ask`, which makes process `pid` write its stacks, and append the stacks to the log of process `key`.

    `cause` says how the hang was detected. If the disk is full or the process has ended, this is only logged.
    """
    output = run.logs / f"{key[0]}-{key[1]}.out"
    try:
        if _is_stopped(pid):
            stacks = "none: the process is stopped (SIGSTOP), and a stopped process cannot write them"
        else:
            with output.open("rb") as file:
                begin = os.fstat(file.fileno()).st_size
                ask()
                stacks = await _new_text(file.fileno(), begin) or f"none: it wrote nothing within {LIMIT_S:g} s"
        line = {
            **{"service": key[0], "instance": key[1], "run": run.name, "pid": pid},
            **{"event": "hangs, and is killed", "level": "error", "cause": cause},
            **{"timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"), "stacks": stacks},
        }
        log = os.open(run.log_file(*key), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(log, json.dumps(line).encode() + b"\n")
        finally:
            os.close(log)
    except OSError as error:  # a full disk, or a process that has ended in the meantime
        structlog.get_logger(SUPERVISOR).warning("no stacks", pid=pid, error=str(error))


async def _new_text(output: int, begin: int) -> str:
    """Return the text appended to the file `output` after offset `begin`, once the file no longer grows."""
    size = begin
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            while size == begin or os.fstat(output).st_size != size:
                size = os.fstat(output).st_size
                await asyncio.sleep(_POLL_S)
    return os.pread(output, LIMIT_BYTES, begin).decode(errors="replace")


def _is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal or a debugger. Raises OSError if there is no such process."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state in ("T", "t")
