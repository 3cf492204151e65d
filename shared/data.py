"""Where dataset rows come from: opens a named source, reads a row at a time. Must never import torch, hold a
whole file in memory, or return a row that the rollout could not prompt with.

A row is a dict ``{"prompt": "text" | [{"role", "content"}...], "answer"?, "id"?, "tools"?, anything else}``.
Sources:

- ``builtin:addition`` and ``builtin:addition?split=test``: two-digit additions, ``"47+85="`` -> ``"132"``.
- ``jsonl:/path/file.jsonl``: one JSON object a line; blank lines are no rows. A relative path is relative to
  the working directory.

The index of a row is part of its task id, so it counts bad rows too: dropping one never renumbers the others.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from array import array
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

Row = dict[str, Any]

_SCAN_CHUNK_BYTES = 1 << 20
_SHOWN_CHARS = 60
_UTF8_BOM = b"\xef\xbb\xbf"
_ADDITION_TEST_ROWS = 256


class DataError(Exception):
    """A source or a row that cannot be used. One line: the place, the value and the remedy."""


@dataclass(frozen=True)
class RowError:
    """One unusable row: its index in the source, its 1-based line in the file, the text of its DataError."""

    index: int
    line: int
    message: str


class Source(Protocol):
    """An ordered set of rows with random access; the same index is the same row in every process."""

    @property
    def name(self) -> str:
        """The source as the topology names it."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row `index`, a dict of its own for each call. Raises DataError when the row cannot be used and
        IndexError outside 0 <= index < len."""

    def validate(self) -> list[RowError]:
        """Reads every row once and returns the unusable ones in order; `row` raises for exactly these."""


def open_source(source: str, *, where: str) -> Source:
    """Opens `source`; `where` is the file:line that named it and starts every error about the source itself.

    Raises DataError for an unknown kind, builtin or parameter and for a file that is missing or has no rows.
    A bad row is not an error here: see `Source.validate`.
    """
    kind, colon, rest = source.partition(":")
    if colon and kind == "builtin":
        return _open_builtin(source, rest, where)
    if colon and kind == "jsonl":
        return JsonlSource(rest, name=source, where=where)
    raise DataError(f"{where}: source {source!r} is of no known kind; write builtin:addition or jsonl:/path/file.jsonl")


def _open_builtin(source: str, rest: str, where: str) -> Source:
    builtin, _, query = rest.partition("?")
    if builtin != "addition":
        raise DataError(f"{where}: source {source!r} names no builtin{_nearest(builtin, ['addition'])}")
    split = "train"
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "split":
            raise DataError(f"{where}: source {source!r} has unknown parameter {key!r}{_nearest(key, ['split'])}")
        if value not in ("train", "test"):
            raise DataError(f"{where}: source {source!r} has split {value!r}; the splits are train and test")
        split = value
    return AdditionSource(split, name=source)


def _nearest(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


class AdditionSource:
    """Every pair of two-digit numbers once, in a fixed shuffled order: 256 `test`, 7,844 `train` rows."""

    def __init__(self, split: str, *, name: str) -> None:
        # Ordered by a digest, not by random.shuffle: the split must be the same in every Python version.
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        pairs.sort(key=lambda ab: hashlib.blake2b(b"%d+%d" % ab, digest_size=8).digest())
        self._pairs = pairs[:_ADDITION_TEST_ROWS] if split == "test" else pairs[_ADDITION_TEST_ROWS:]
        self._split = split
        self.name = name

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> Row:
        _check_index(index, len(self), self.name)
        a, b = self._pairs[index]
        return {"id": f"addition-{self._split}-{index}", "prompt": f"{a}+{b}=", "answer": str(a + b)}

    def validate(self) -> list[RowError]:
        return []


class JsonlSource:
    """One JSON object a line. Holds 16 bytes a row (offset, line number) and parses a row when asked for it.

    Reads are positional, so threads may share one source. A file that changes while it is open is refused,
    because the offsets, and with them the task ids, would no longer name the same rows.
    """

    def __init__(self, path: str, *, name: str, where: str) -> None:
        self.name = name
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
                'write one JSON object a line, such as {"prompt": "1+1=", "answer": "2"}'
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def row(self, index: int) -> Row:
        _check_index(index, len(self), self.name)
        place = f"{self.path}:{self._lines[index]}"
        if self._stat() != self._stamp:
            raise DataError(f"{place}: the file changed while it was in use; restart the run on the new file")
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        return _parse_row(_read_range(self._fd, start, end), place)

    def validate(self) -> list[RowError]:
        errors = []
        for index in range(len(self)):
            try:
                self.row(index)
            except DataError as error:
                errors.append(RowError(index=index, line=self._lines[index], message=str(error)))
        return errors

    def _stat(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _check_index(index: int, rows: int, name: str) -> None:
    if not 0 <= index < rows:
        raise IndexError(f"source {name!r} has no row {index}: it has rows 0 to {rows - 1}")


def _scan_lines(fd: int) -> tuple[array[int], array[int]]:
    """Byte offset and 1-based line number of every line that is not blank."""
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
            break  # truncated after the scan; the shorter text fails to parse or the next stat refuses it
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _parse_row(text: bytes, place: str) -> Row:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{place}: invalid JSON ({error}): {_shown(text)}; write one JSON object a line") from error
    problem = _row_problem(row)
    if problem:
        raise DataError(f"{place}: {problem}: {_shown(text)}")
    return row  # type: ignore[no-any-return]  # _row_problem has checked that it is a dict


def _row_problem(row: object) -> str | None:
    """What makes `row` unusable, with the remedy; None when nothing does."""
    if not isinstance(row, dict):
        return f"a row must be a JSON object with a prompt, not {_json_type(row)}"
    if "prompt" not in row:
        keys = ", ".join(sorted(row)) or "none"
        return f"row has no prompt (its keys: {keys}); add a prompt: text or a list of messages"
    problem = _prompt_problem(row["prompt"])
    if problem:
        return problem
    if not isinstance(row.get("tools", []), list | None):
        return f"tools must be a list of tool definitions, not {_json_type(row['tools'])}"
    if isinstance(row.get("id", ""), list | dict | bool | float):
        return f"id must be text or a whole number, not {_json_type(row['id'])}"
    return None


def _prompt_problem(prompt: object) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "prompt is empty; a prompt needs at least one character"
    if not isinstance(prompt, list):
        return f"prompt must be text or a list of messages, not {_json_type(prompt)}"
    if not prompt:
        return "prompt is an empty list; a prompt needs at least one message"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'prompt message {number} has no role; a message is {{"role": ..., "content": ...}}'
        content = message.get("content")
        # A list holds parts, for templates that know them; a turn that only calls tools has no content.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f'prompt message {number} has no content; a message is {{"role": ..., "content": ...}}'
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(text: bytes) -> str:
    line = text.decode("utf-8", errors="backslashreplace").strip()
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."
