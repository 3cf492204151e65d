"""Reads the logs in a run directory and formats them for people. It never writes there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from launch.supervisor.plan import Key
from shared.actor.logging import TAIL_BYTES
from shared.rundir import RunDir, service_name

_NOT_SHOWN = frozenset(
    {"timestamp", "level", "event", "service", "instance", "incarnation", "run", "exception", "stacks"}
)


def tail(path: Path, lines: int) -> list[str]:
    """Return the last `lines` lines of a text file, or [] if it does not exist. Reads at most 256 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def readable(line: str) -> str:
    """Format a line of a `.jsonl` log: time, level, service, event, fields, traceback. Other text is left unchanged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    time = str(entry.get("timestamp", ""))[11:23]
    who = service_name(str(entry.get("service", "?")), int(entry.get("instance", 0)))
    fields = " ".join(
        f"{key}={value}" for key, value in entry.items() if key not in _NOT_SHOWN and value not in ("", None)
    )
    text = f"{time} {str(entry.get('level', '')).upper():<7} {who:<24} {entry.get('event', '')}  {fields}".rstrip()
    trace = entry.get("exception") or entry.get("stacks")
    return f"{text}\n{trace}" if trace else text


def last_lines(run: RunDir, key: Key, lines: int) -> list[str]:
    """Return the last `lines` readable lines of a service's log, then its output (such as an import traceback)."""
    log = [part for line in tail(run.log_file(*key), lines) for part in readable(line).splitlines()]
    printed = tail(run.logs / f"{key[0]}-{key[1]}.out", lines)
    return (log[-lines:] + printed)[-lines:] if printed else log[-lines:]


class Follower:
    """Reader of the complete lines that were added to a file since the previous call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_lines(self) -> Iterator[str]:
        """Yield each new complete line. A file that has shrunk is read from its start."""
        try:
            size = self._path.stat().st_size
            if size < self._position:
                self._position = 0
            if size == self._position:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._position += whole
        yield from data[:whole].decode(errors="replace").splitlines()


def shorten(text: str, limit_chars: int = 200) -> str:
    """Cut `text` to one line of at most `limit_chars` characters. The log has the full text."""
    line = " ".join(text.split())
    return line if len(line) <= limit_chars else f"{line[: limit_chars - 1]}…"
