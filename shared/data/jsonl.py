"""`jsonl:/path/file.jsonl`: one JSON object per line; blank lines are skipped. The file is not held in memory."""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from shared.data.source import (
    MOST_ROW_BYTES,
    SHOWN_CHARS,
    DataError,
    OnRow,
    Row,
    RowError,
    SourceChanged,
    check_index,
    cut,
    too_large,
    usable,
)

_SCAN_CHUNK_BYTES = 1 << 20
_READ_ROWS = 4096
_READ_BYTES = 16 << 20
_UTF8_BOM = b"\xef\xbb\xbf"


class JsonlSource:
    """A JSONL file. The source keeps 16 bytes per row (offset, line number) and parses each row when that row is read.

    Reads are positional, so threads may share one source. A file that changes while it is open is refused,
    because its offsets, and with them the task ids, would no longer identify the same rows.
    """

    def __init__(self, path: str, fields: Mapping[str, str], *, name: str, where: str) -> None:
        self.name = name
        self._fields = fields
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stamp = self._stat()
            self._starts, self._lines = _scan_lines(self._fd)
        except OSError as error:
            raise DataError(
                f"{where}: source {name!r} cannot be read: {error.strerror} ({os.path.abspath(path)}); "
                "give the path of a readable JSONL file"
            ) from error
        self._starts.append(self._stamp[0])  # the end of the last row
        if not self._lines:
            raise DataError(
                f"{where}: source {name!r} has no rows ({self._stamp[0]} bytes); "
                'write one JSON object per line, such as {"prompt": "1+1=", "answer": "2"}'
            )

    def __len__(self) -> int:
        return len(self._lines)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def row(self, index: int) -> Row:
        return self._parsed(index, self._text(index))

    def content(self, index: int) -> bytes:
        return self._content(index, self._text(index))

    def place(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}"

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        errors = []
        for index, text in enumerate(self._texts()):
            row = None
            try:
                row = self._parsed(index, text)
            except DataError as error:
                errors.append(RowError(index=index, line=self._lines[index], message=str(error)))
            if on_row is not None:
                on_row(self._content(index, text), row)
        return errors

    def _size(self, index: int) -> int:
        return self._starts[index + 1] - self._starts[index]

    def _text(self, index: int) -> bytes:
        """Return the line of a row, or the beginning of a line that is too long. Raises SourceChanged."""
        check_index(index, len(self), self.name)
        self._check_unchanged(index)
        start = self._starts[index]
        return _read_range(self._fd, start, start + min(self._size(index), MOST_ROW_BYTES + 1))

    def _content(self, index: int, text: bytes) -> bytes:
        if self._size(index) > MOST_ROW_BYTES:
            return b"%d bytes: %r" % (self._size(index), text[:SHOWN_CHARS])
        return text.strip()

    def _parsed(self, index: int, text: bytes) -> Row:
        if self._size(index) > MOST_ROW_BYTES:
            raise too_large(self.place(index), self._size(index))
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{self.place(index)}: invalid JSON ({error}): {cut(_shown(text))}; write one JSON object per line"
            ) from error
        return usable(row, self._fields, self.place(index), partial(_shown, text))

    def _texts(self) -> Iterator[bytes]:
        """Yield the line of each row, as `_text` does. Many are read at a time, because a system call costs more than a
        row.

        Raises SourceChanged.
        """
        first = 0
        while first < len(self):
            start = self._starts[first]
            last = min(bisect.bisect(self._starts, start + _READ_BYTES, first) - 1, first + _READ_ROWS)
            if last <= first:
                yield self._text(first)
                first += 1
                continue
            self._check_unchanged(first)
            block = _read_range(self._fd, start, self._starts[last])
            for index in range(first, last):
                yield block[self._starts[index] - start : self._starts[index + 1] - start]
            first = last

    def _check_unchanged(self, index: int) -> None:
        if self._stat() != self._stamp:
            raise SourceChanged(
                f"{self.place(index)}: the file changed while it was in use; restore it and resume the run, or begin a "
                "new run"
            )

    def _stat(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _scan_lines(fd: int) -> tuple[array[int], array[int]]:
    """Return the byte offset and 1-based line number of every line that is not blank."""
    starts, numbers = array("Q"), array("Q")
    with open(fd, "rb", buffering=_SCAN_CHUNK_BYTES, closefd=False) as file:
        offset = start = number = 0
        ended, blank = True, True
        # A line may be longer than the memory of this machine, so it is read in parts.
        for part in iter(partial(file.readline, _READ_BYTES), b""):
            if ended:
                number, start, blank = number + 1, offset, True
                if number == 1 and part.startswith(_UTF8_BOM):
                    start = len(_UTF8_BOM)
                    part = part[start:]
                    offset = start
            if blank and part and not part.isspace():
                blank = False
                starts.append(start)
                numbers.append(number)
            offset += len(part)
            ended = part.endswith(b"\n")
    return starts, numbers


def _read_range(fd: int, start: int, end: int) -> bytes:
    parts = []
    while start < end:
        part = os.pread(fd, end - start, start)
        if not part:
            break  # truncated after the scan: parsing the shorter text fails, or the next stat refuses the file
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _shown(text: bytes) -> str:
    return text[: 8 * SHOWN_CHARS].decode("utf-8", errors="backslashreplace").strip()
