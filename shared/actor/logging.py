"""Structured logs: JSON lines in the run directory, and a readable line on the console for services run by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

CONSOLE_FIELDS = ("service", "instance", "incarnation", "run")


class _Tee:
    """Writes each event as one JSON line to a file and, when asked to, as one readable line to a console."""

    def __init__(self, file: TextIO, console: TextIO | None) -> None:
        self._file = file
        self._console = console
        self._to_json = structlog.processors.JSONRenderer(sort_keys=False, default=str)
        self._to_text = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        line = self._to_json(logger, method, dict(event))
        self._file.write(f"{line if isinstance(line, str) else line.decode()}\n")
        if self._console is not None:
            short = {key: value for key, value in event.items() if key not in CONSOLE_FIELDS}
            self._console.write(f"{self._to_text(logger, method, short)}\n")
        raise structlog.DropEvent


def configure(path: Path, *, console: TextIO | None = None, level: int = 20, **fields: Any) -> None:
    """Send this process's logs to `path` (appended, line-buffered); `fields` stand on every line.

    `console`: also print there. `level`: 10 debug, 20 info, 30 warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1)
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
            _Tee(file, console),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
