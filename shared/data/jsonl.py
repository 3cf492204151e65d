"""`jsonl:/path/file.jsonl`: one JSON object per line; blank lines are skipped. The file is not held in memory."""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Iterator

import msgspec

from shared.data.source import (
    SHOWN_CHARS,
    DataError,
    OnRow,
    Row,
    RowError,
    SourceChanged,
    check_index,
    row_problem,
    with_prompt,
)

_SCAN_CHUNK_BYTES = 1 << 20
_READ_ROWS = 4096
_UTF8_BOM = b"\xef\xbb\xbf"


class JsonlSource:
    """A JSONL file. The source keeps 16 bytes per row (offset, line number) and parses each row when that row is read.

    Reads are positional, so threads may share one source. A file that changes while it is open is refused,
    because its offsets, and with them the task ids, would no longer identify the same rows.
    """

    def __init__(self, path: str, prompt: str = "prompt", *, name: str, where: str) -> None:
        self.name = name
        self._prompt = prompt
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
        self._end = self._stamp[0]
        if not self._starts:
            raise DataError(
                f"{where}: source {name!r} has no rows ({self._end} bytes); "
                'write one JSON object per line, such as {"prompt": "1+1=", "answer": "2"}'
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def row(self, index: int) -> Row:
        return _parse_row(self._text(index), self.place, index, self._prompt)

    def content(self, index: int) -> bytes:
        return self._text(index).strip()

    def _text(self, index: int) -> bytes:
        check_index(index, len(self), self.name)
        self._check_unchanged(index)
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        return _read_range(self._fd, start, end)

    def place(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}"

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        errors = []
        for index, text in enumerate(self._texts()):
            if on_row is not None:
                on_row(text.strip())
            try:
                _parse_row(text, self.place, index, self._prompt)
            except DataError as error:
                errors.append(RowError(index=index, line=self._lines[index], message=str(error)))
        return errors

    def _texts(self) -> Iterator[bytes]:
        """Yield the line of each row. A few thousand are read at a time, because a system call costs more than a row.

        Raises SourceChanged.
        """
        for first in range(0, len(self), _READ_ROWS):
            self._check_unchanged(first)
            starts = [*self._starts[first : first + _READ_ROWS + 1]]
            if len(starts) <= _READ_ROWS:
                starts.append(self._end)
            block = _read_range(self._fd, starts[0], starts[-1])
            for start, end in itertools.pairwise(starts):
                yield block[start - starts[0] : end - starts[0]]

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
        offset = 0
        for number, line in enumerate(file, start=1):
            start = offset
            offset += len(line)
            if number == 1 and line.startswith(_UTF8_BOM):
                start += len(_UTF8_BOM)
                line = line[len(_UTF8_BOM) :]
            if not line.isspace() and line:
                starts.append(start)
                numbers.append(number)
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


def _parse_row(text: bytes, place: Callable[[int], str], index: int, prompt: str) -> Row:
    try:
        row = with_prompt(msgspec.json.decode(text), prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{place(index)}: invalid JSON ({error}): {_shown(text)}; write one JSON object per line"
        ) from error
    problem = row_problem(row)
    if problem:
        raise DataError(f"{place(index)}: {problem}: {_shown(text)}")
    return row  # type: ignore[no-any-return]  # row_problem has checked that it is a dict


def _shown(text: bytes) -> str:
    line = text.decode("utf-8", errors="backslashreplace").strip()
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."
