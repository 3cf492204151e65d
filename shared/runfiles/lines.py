"""Reads a file of lines as it grows, and detects when lines that have already been read are removed.

Lines that `shared.bounded_file` removes from the beginning of the file do not count as removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shared.bounded_file import FileHead, head_of

READ_BYTES = 4 << 20
"""Default limit in bytes of one `poll`, and of the length of a line. Longer lines are skipped."""


class FollowedFile:
    """The complete lines of one file."""

    def __init__(self, path: Path, *, last_bytes: int | None = None, read_bytes: int = READ_BYTES) -> None:
        """With `last_bytes`, begin that many bytes before the end of the file."""
        self._path = path
        self._read_bytes = read_bytes
        self._position = 0
        """The number of bytes that have been read or skipped. It includes bytes that were removed from the file since
        (see `FileHead.offset`)."""
        self._newest = b""
        """The last line that was read. If it no longer ends at `_position`, the file was truncated."""
        self._skipping = False
        if last_bytes is not None:
            try:
                with path.open("rb") as file:
                    begin = max(0, os.fstat(file.fileno()).st_size - last_bytes)
                    self._position = head_of(file.fileno()).offset + begin
            except OSError:
                return  # reading begins when the file appears
            self._skipping = begin > 0

    def poll(self) -> tuple[list[bytes], bool]:
        """Return the new lines, and whether reading began again at the start of the file because lines were removed.

        There may be more lines: call this until it returns none.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return [], self._restart()
        try:
            head = head_of(descriptor)
            restarted = self._was_truncated(descriptor, head) and self._restart()
            begin = self._position - head.offset
            if begin < head.nbytes:  # the lines after `_position` are gone, as the first line says
                self._position, begin = head.offset, 0
            data = os.pread(descriptor, self._read_bytes, begin)
        except OSError:
            return [], False
        finally:
            os.close(descriptor)
        whole = data.rfind(b"\n") + 1
        if not whole:
            if len(data) == self._read_bytes:  # a line that is too long
                self._position += len(data)
                self._newest, self._skipping = data[-1:], True
            return [], restarted
        self._position += whole
        lines = data[:whole].split(b"\n")[:-1]
        self._newest = lines[-1] + b"\n"
        if self._skipping:
            lines, self._skipping = lines[1:], False
        return lines, restarted

    def new_lines(self) -> Iterator[str]:
        """Yield all new lines as text. After a file is truncated, its lines are yielded again."""
        while True:
            lines, _ = self.poll()
            if not lines:
                return
            for line in lines:
                yield line.decode(errors="replace")

    def _was_truncated(self, descriptor: int, head: FileHead) -> bool:
        end = self._position - head.offset
        if os.fstat(descriptor).st_size < end:
            return True
        begin = end - len(self._newest)
        return begin >= head.nbytes and os.pread(descriptor, len(self._newest), begin) != self._newest

    def _restart(self) -> bool:
        began = self._position > 0
        self._position, self._newest, self._skipping = 0, b"", False
        return began
