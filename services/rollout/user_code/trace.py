"""Locates errors and hangs in users' code: as `file:line` for people and as a traceback for the log.

No function here raises an exception, whatever the user's exception is.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.stacks import STACK_SIGNAL, written

STACK_LIMIT_S = 0.25
"""Maximum seconds that a report waits for a stack. A stopped process never writes one."""
STACK_BYTES = 1 << 14
_POLL_S = 0.01
TRACE_CHARS = 4000
PLACE_CHARS = 200
DEPTH = 8
_FRAME = re.compile(r'^ {2}File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OURS = tuple(f"{Path(__file__).parents[3] / name}{os.sep}" for name in ("proto", "shared", "services", "launch"))
_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *_OURS,
)
"""Folders with code that is not the user's."""


class Home(msgspec.Struct, array_like=True, frozen=True):
    """The file and line where a user's function is defined. For a class or a builtin, the fields are empty."""

    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        return place(self.file, self.line)


def home_of(function: Callable[..., Any]) -> Home:
    """Return the place where `function` is defined, looking through decorators that set `__wrapped__`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Home(code.co_filename, code.co_firstlineno) if code is not None else Home()


def place(file: str, line: int) -> str:
    """Return a place such as `my_rewards.py:12`, relative to the current folder or to a folder on Python's path."""
    if not file:
        return ""
    with contextlib.suppress(OSError):
        relative = [os.path.relpath(file, folder or os.curdir) for folder in ("", *sys.path)]
        file = min((candidate for candidate in relative if not candidate.startswith(os.pardir)), key=len, default=file)
    return f"{file[-PLACE_CHARS:]}:{line}"


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then the exceptions that caused it or that were being handled when it was raised. The `reason` of
    a urllib error is included."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < DEPTH:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        hidden = None if link.__suppress_context__ else link.__context__
        linked = (link.__cause__, hidden, getattr(link, "reason", None))
        waiting += [other for other in linked if isinstance(other, BaseException)]


def raised_at(error: BaseException, home: Home) -> str:
    """Return the innermost line of the function's own file that `error` passed through, or else the function's first
    line."""
    for cause in chain(error):
        lines = [
            line for frame, line in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_filename == home.file
        ]
        if lines:
            return place(home.file, lines[-1])
    return home.place


def traced(error: BaseException, home: Home) -> str:
    """Return the traceback without frames of this project, or its end if it is long. Frames of the function's own file
    are kept."""
    try:
        whole = traceback.TracebackException.from_exception(error)
        waiting = [whole]
        while waiting:
            link = waiting.pop()
            frames = [frame for frame in link.stack if not _is_ours(frame.filename, home)]
            link.stack = traceback.StackSummary.from_list(frames)
            linked = (link.__cause__, link.__context__, *(link.exceptions or ()))
            waiting += [other for other in linked if other is not None]
        return "".join(whole.format())[-TRACE_CHARS:]
    except Exception as failure:  # converting a user's exception to text may raise
        return f"{type(error).__name__}, whose text is not available ({type(failure).__name__})"


def users_stack(stack: str, home: Home) -> str:
    """Do what `traced` does, for a stack that the process wrote to its `StackFile`."""
    places = [(_FRAME.match(line), line) for line in stack.splitlines(keepends=True)]
    return "".join(line for frame, line in places if frame is None or not _is_ours(frame[1], home))


def _is_ours(file: str, home: Home) -> bool:
    return file != home.file and file.startswith(_OURS)


class StackLine(NamedTuple):
    """A line of a stack that a process wrote to its `StackFile`."""

    file: str
    line: int
    function: str


def stack_lines(stack: str) -> list[StackLine]:
    """Return the lines of a stack, innermost first, without those of Python's frozen modules."""
    lines = (StackLine(file, int(line), function) for file, line, function in _FRAME.findall(stack))
    return [line for line in lines if not line.file.startswith("<")]


def users_line(lines: Sequence[StackLine], home: Home) -> StackLine | None:
    """Return the innermost line of the user's code: of the file of `home`, or of a file outside all libraries."""
    for line in lines:
        if line.file == home.file or not line.file.startswith(_LIBRARIES):
            return line
    return None


def hangs_at(stack: str, home: Home) -> str:
    """Return the innermost line of the user's code in a stack, or else the first line of the user's function."""
    line = users_line(stack_lines(stack), home)
    return home.place if line is None else place(line.file, line.line)


class StackFile:
    """The service's side: a file in memory, and the process that writes its stack there on request."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stack", os.MFD_CLOEXEC)
        self._process = -1

    def belongs_to(self, pid: int) -> None:
        """Set the process that writes the file. A process that is already gone writes nothing."""
        with contextlib.suppress(OSError):
            self._process = os.pidfd_open(pid)

    async def read(self, limit_s: float = STACK_LIMIT_S) -> str:
        """Return the current stack of the process, or an empty string after `limit_s` without an answer."""
        if self._process < 0:
            return ""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.lseek(self.descriptor, 0, os.SEEK_SET)  # the offset is shared with the process
            signal.pidfd_send_signal(self._process, STACK_SIGNAL)
        return await written(self.descriptor, 0, limit_s=limit_s, poll_s=_POLL_S, limit_bytes=STACK_BYTES)

    def close(self) -> None:
        for descriptor in (self.descriptor, self._process):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._process = -1
