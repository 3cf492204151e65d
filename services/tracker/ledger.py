"""What a tracker has received of a run, in `trackers/<name>.json` of the run directory, replaced atomically."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from proto.messages import ErrorCode
from services.tracker.history import History
from shared.rpc.errors import RpcError

FOLDER = "trackers"


class Ledger(msgspec.Struct, kw_only=True):
    """The state of one tracker. A file that is missing or damaged counts as empty."""

    id: str = ""  # names the run in the tracker
    pid: int = 0  # the process that feeds the tracker, or fed it last
    sent: int = 0  # rows of the run's history that were handed over
    step: int = 0  # the training step of the last of them
    sure: int = 0  # rows that the tracker is known to hold
    lineage: int = 0  # lineage of the last row
    warnings: int = 0  # lines of warnings.jsonl that were sent
    warnings_sure: int = 0  # lines that the tracker is known to hold
    ended: str = ""  # the outcome that the tracker was told, empty while the run goes on
    problem: str = ""  # why rows are waiting, one line; empty if they are not


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


def hold(run: Path, name: str) -> int:
    """Return a lock that lets one process at a time feed tracker `name`. It lasts until the process dies.

    Raises RpcError(busy) if another process has it.
    """
    path = file_of(run, name).with_suffix(".lock")
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RpcError(
            ErrorCode.BUSY, f"tracker {name}: another process feeds it; wait for the end of the run"
        ) from None
    return descriptor


def unsent(run: Path, name: str) -> str:
    """Return what tracker `name` may lack after the end of the run, one line, or an empty string."""
    ledger, history = read(run, name), History(run)
    history.refresh()
    if ledger.sure >= len(history) and ledger.ended:
        return ""
    because = f" ({ledger.problem})" if ledger.problem else ""
    if ledger.sure >= len(history):
        return f"{name} has every step, but not the end of the run{because}"
    first, last = history.step(ledger.sure), history.step(len(history) - 1)
    steps = f"steps {first}-{last}" if last != first else f"step {last}"
    return f"{name} {'may lack' if ledger.sent > ledger.sure else 'lacks'} {steps}{because}"
