"""Reads the logs in a run directory and formats them for people. It never writes there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from shared.actor.logging import TAIL_BYTES
from shared.rundir import RunDir, service_name
from shared.view.notices import LogLine

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
    entry = parsed(line)
    if entry is None:
        return line
    return f"{entry.at[11:23]} {entry.level.upper():<7} {entry.service:<24} {entry.text}".rstrip()


def parsed(line: str, limit_chars: int | None = None) -> LogLine | None:
    """Parse a line of a `.jsonl` log, or return None for other text.

    The text of the result consists of the event, the fields and the traceback. Of a text that is longer than
    `limit_chars` characters, it has the beginning and the end, and how many characters are left out between them.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    fields = " ".join(
        f"{key}={value}" for key, value in entry.items() if key not in _NOT_SHOWN and value not in ("", None)
    )
    text = f"{entry.get('event', '')}  {fields}".rstrip()
    instance, trace = entry.get("instance"), entry.get("exception") or entry.get("stacks")
    return LogLine(
        at=str(entry.get("timestamp", "")),
        level=str(entry.get("level", "")),
        service=service_name(str(entry.get("service", "?")), instance if isinstance(instance, int) else 0),
        text=_cut(f"{text}\n{trace}" if trace else text, limit_chars),
    )


def _cut(text: str, limit_chars: int | None) -> str:
    if limit_chars is None or len(text) <= limit_chars:
        return text
    half = limit_chars // 2
    return f"{text[:half]}… ({len(text) - 2 * half:,} more characters) …{text[-half:]}"


def last_lines(run: RunDir, key: tuple[str, int], lines: int) -> list[str]:
    """Return the last `lines` readable lines of a service's log, then its output (such as an import traceback)."""
    log = [part for line in tail(run.log_file(*key), lines) for part in readable(line).splitlines()]
    printed = tail(run.logs / f"{key[0]}-{key[1]}.out", lines)
    return (log[-lines:] + printed)[-lines:] if printed else log[-lines:]


def shorten(text: str, limit_chars: int = 200) -> str:
    """Cut `text` to one line of at most `limit_chars` characters. The log has the full text."""
    line = " ".join(text.split())
    return line if len(line) <= limit_chars else f"{line[: limit_chars - 1]}…"
