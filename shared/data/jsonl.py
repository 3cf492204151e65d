"""`jsonl:/path/file.jsonl`: one JSON object per line; blank lines are skipped. The file is not held in memory."""

from __future__ import annotations

import os
from array import array

import msgspec

from shared.data.source import SHOWN_CHARS, DataError, Row, RowError, bad_rows, check_index, row_problem, with_prompt

_SCAN_CHUNK_BYTES = 1 << 20
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
        check_index(index, len(self), self.name)
        place = self.place(index)
        if self._stat() != self._stamp:
            raise DataError(f"{place}: the file changed while it was in use; restart the run on the new file")
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        return _parse_row(_read_range(self._fd, start, end), place, self._prompt)

    def place(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}"

    def validate(self) -> list[RowError]:
        return bad_rows(self, self._lines)

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


def _parse_row(text: bytes, place: str, prompt: str) -> Row:
    try:
        row = with_prompt(msgspec.json.decode(text), prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{place}: invalid JSON ({error}): {_shown(text)}; write one JSON object per line") from error
    problem = row_problem(row)
    if problem:
        raise DataError(f"{place}: {problem}: {_shown(text)}")
    return row  # type: ignore[no-any-return]  # row_problem has checked that it is a dict


def _shown(text: bytes) -> str:
    line = text.decode("utf-8", errors="backslashreplace").strip()
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."
