"""Records which data of a run a tracker has received, in `trackers/<name>.json` in the run directory.

The file is replaced atomically.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.runfiles.metrics import CommittedRows

FOLDER = "trackers"


class Ledger(msgspec.Struct, kw_only=True):
    """The data that one tracker has received. A missing or damaged file counts as empty."""

    id: str = ""  # identifies the run in the tracker
    pid: int = 0  # id of the process that feeds the tracker, or that fed it last
    sent: int = 0  # number of rows of the run that have been handed over
    step: int = 0  # the training step of the last of these rows
    sure: int = 0  # number of rows that the tracker is known to hold
    warnings: int = 0  # number of lines in warnings.jsonl that have been sent
    warnings_sure: int = 0  # number of these warnings that the tracker is known to hold
    ended: str = ""  # the outcome reported to the tracker, empty while the run continues
    problem: str = ""  # the reason why rows are waiting, in one line; empty if none are waiting
    see: str = ""  # the command that shows the run, or the address at which it is seen; empty until the tracker has it


def file_of(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.json"


def read(run: Path, name: str) -> Ledger:
    """Return the ledger of tracker `name`."""
    try:
        return msgspec.json.decode(file_of(run, name).read_bytes(), type=Ledger)
    except (OSError, msgspec.DecodeError):
        return Ledger()


def write(run: Path, name: str, ledger: Ledger) -> None:
    """Replace the ledger of tracker `name`. Raises OSError."""
    path = file_of(run, name)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(msgspec.json.encode(ledger))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def hold(run: Path) -> None:
    """Lock the trackers of a run, so that only one process at a time feeds them.

    The process keeps the lock until it dies. Raises RpcError(busy) if another process holds the lock.
    """
    path = run / FOLDER / "lock"
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        text = f"run {run}: another process is feeding its trackers; wait until the run has ended"
        raise RpcError(ErrorCode.BUSY, text) from None


def unsent(run: Path, name: str) -> str:
    """Return one line about the data that tracker `name` may lack after the end of the run, or an empty string."""
    ledger, rows = read(run, name), CommittedRows(run)
    steps: list[int] = []
    more = True
    while more:
        page, more = rows.poll()
        steps += [row.step for row in page if row.position >= ledger.sure]
    because = f" ({ledger.problem})" if ledger.problem else ""
    if not steps:
        return "" if ledger.ended else f"{name} has every step, but not the end of the run{because}"
    first, last = steps[0], steps[-1]
    verb = "may lack" if ledger.sent > ledger.sure else "lacks"
    return f"{name} {verb} {f'steps {first}-{last}' if last != first else f'step {last}'}{because}"
