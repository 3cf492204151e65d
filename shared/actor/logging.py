"""Structured logs: JSON lines in the run directory, and readable lines on the console of services started by hand.

`log_page` reads pages of such a log, to answer requests over the bus.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from shared import bounded_file

TAIL_BYTES = 256 << 10
CONSOLE_FIELDS = ("service", "instance", "incarnation", "run")


class _Tee:
    """Writes each event as one JSON line to a file and, if there is a console, as one readable line to the console.

    Write errors (a full disk, a closed console) are not raised. Lines that were not written to the file are counted. If
    the file exceeds its limit, its oldest lines are removed (`shared.bounded_file`).
    """

    def __init__(self, path: Path, console: TextIO | None, fields: Mapping[str, str | int]) -> None:
        """`fields` are added to the line that says how many bytes were removed from the file. Raises OSError."""
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._fields = fields
        self._cutting = threading.Lock()
        """Held while the file is being cut."""
        self._console = console
        self._lost = 0
        """Number of lines lost since the last line that was written."""
        self._torn = False
        self._to_json = structlog.processors.JSONRenderer(sort_keys=False, default=str)
        self._to_text = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        whole = {**event, "lost_lines": self._lost} if self._lost else dict(event)
        line = self._to_json(logger, method, whole)
        self._write(line.encode() if isinstance(line, str) else line)
        if self._console is not None:
            short = {key: value for key, value in event.items() if key not in CONSOLE_FIELDS}
            with contextlib.suppress(OSError):
                self._console.write(f"{self._to_text(logger, method, short)}\n")
        raise structlog.DropEvent

    def _write(self, line: bytes) -> None:
        data = b"\n" * self._torn + line + b"\n"
        try:
            written = os.write(self._file, data)
            size = os.fstat(self._file).st_size
        except OSError:
            self._lost += 1
            return
        self._torn = written < len(data)
        self._lost = self._lost + 1 if self._torn else 0
        if size > bounded_file.LIMIT_BYTES and self._cutting.acquire(blocking=False):
            self._begin_cut()

    def _begin_cut(self) -> None:
        """Cut the file on a thread of its own, because the disk may be slow."""

        def work() -> None:
            # the path of the descriptor, because the file may have been renamed or deleted
            own = Path(f"/proc/self/fd/{self._file}")
            try:
                with contextlib.suppress(OSError):  # the disk may be full; the next line tries again
                    bounded_file.cut(own, bounded_file.LIMIT_BYTES, self._fields)
            finally:
                self._cutting.release()

        try:
            threading.Thread(target=work, name="log limit").start()
        except RuntimeError:  # no thread can be started
            self._cutting.release()


def configure(path: Path, *, console: TextIO | None = None, **fields: Any) -> None:
    """Append this process's logs to `path`, line by line, with `fields` on every line.

    Also print them to `console`, if given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    named: dict[str, str | int] = {key: fields[key] for key in ("service", "instance") if key in fields}
    tee = _Tee(path, console, named)
    structlog.contextvars.clear_contextvars()

    def add_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**fields, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_fields,
            structlog.processors.format_exc_info,
            tee,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def log_page(path: Path, lines: int, position: int) -> tuple[list[str], int]:
    """Return whole lines from `position` on, or the last `lines` lines if `position` is negative, and the position
    after them.

    Positions stay valid when the oldest lines are removed. If the lines after `position` are gone, the page begins with
    the line that says so (`shared.bounded_file`). Reads at most 256 KiB, so all lines after `position` may take several
    pages.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            head = bounded_file.head_of(file.fileno())
            begin = size - TAIL_BYTES if position < 0 else position - head.offset
            begin = begin if head.nbytes <= begin <= size else 0
            file.seek(begin)
            data = file.read(TAIL_BYTES)
    except OSError:
        return [], max(0, position)
    whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == TAIL_BYTES else 0)  # a single line may fill a page
    page = data[:whole].decode(errors="replace").splitlines()
    return (page[-lines:] if lines > 0 else []) if position < 0 else page, head.offset + begin + whole
