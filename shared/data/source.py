"""The interface of a source of dataset rows, the checks that a usable row must pass, and the digests by which a resumed
run recognizes the rows with which it began. The module performs no I/O.

A row is a dict ``{"prompt": "text" | [{"role", "content"}...], "answer"?, "id"?, "tools"?, anything else}``. Its index
is part of its task id. Bad rows also have an index, so dropping a row does not renumber the others.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import xxhash

Row = dict[str, Any]
OnRow = Callable[[bytes], None]

SHOWN_CHARS = 60
DIGEST_BYTES = 8
MOST_DIGESTS = 1 << 16
"""Maximum number of digests of one source, 512 KiB in all. A larger source has one digest for several rows."""


class DataError(Exception):
    """A source or a row is unusable. The message is one line with the place, the value and the remedy."""


class SourceLost(DataError):
    """A source has failed as a whole: no single row is the cause."""


class SourceChanged(SourceLost):
    """The file of a source has changed since it was opened, so an index may now identify another row."""


@dataclass(frozen=True)
class RowError:
    """One unusable row: its index in the source, its 1-based line in the file (0 if the file has no lines), and the
    message of its DataError."""

    index: int
    line: int
    message: str


class Source(Protocol):
    """An ordered set of rows with random access. An index identifies the same row in every process."""

    @property
    def name(self) -> str:
        """The name of the source in the topology."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Return row `index` as a new dict. Raises DataError if the row is unusable, SourceLost if the source is, and
        IndexError unless 0 <= index < len."""

    def place(self, index: int) -> str:
        """Return the location of row `index` for messages: `file:line`, or the closest equivalent."""

    def content(self, index: int) -> bytes:
        """Return the content of row `index`: bytes without a line break that are equal for equal rows and differ for
        different ones. Raises SourceLost."""

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        """Read every row once and return the unusable ones in order. `row` raises for exactly these.

        `on_row`, if given, receives the content of each row, in order and with the unusable ones.
        """


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return the end of an error message about the unknown name `given`: the closest name, or the known ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1)
    shown = names if len(names) <= 12 else [*names[:12], f"and {len(names) - 12} more"]
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(shown)}"


def require(module: str, extra: str, what: str) -> None:
    """Raise DataError, which names the optional `extra` to install, if `module` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise DataError(f"{what} needs the package {module}; install it with: pip install 'rlbus[{extra}]'")


def check_index(index: int, rows: int, name: str) -> None:
    """Raise IndexError unless 0 <= index < rows."""
    if not 0 <= index < rows:
        raise IndexError(f"source {name!r} has no row {index}: it has rows 0 to {rows - 1}")


def encoded(row: Row) -> bytes:
    """Return the content of a row that no file holds as bytes."""
    return msgspec.json.encode(row, enc_hook=repr)


def with_prompt(row: Any, field: str) -> Any:
    """Return `row` with the value of its `field` as the prompt, or unchanged if it is not an object with that field."""
    return row | {"prompt": row[field]} if isinstance(row, dict) and field in row else row


def row_problem(row: object) -> str | None:
    """Return the reason why `row` is unusable, with the remedy, or None if it is usable."""
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
        # A list contains parts, for templates that support them; a turn that only calls tools has no content.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f'prompt message {number} has no content; a message is {{"role": ..., "content": ...}}'
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class RowDigests(msgspec.Struct, frozen=True):
    """The first `rows` rows of a source, as digests of `DIGEST_BYTES` bytes, each of `block` consecutive rows."""

    rows: int
    block: int
    digests: bytes

    def difference(self, now: RowDigests) -> str:
        """Return how the rows of `now`, which has the same blocks, differ from these in half a sentence, or an empty
        string if they begin with these rows."""
        for number in range(now.rows // self.block):
            if self.digest(number) != now.digest(number):
                return f"{self.rows_of(number)} changed"
        if now.rows < self.rows:
            return f"only {now.rows} of {self.rows} are left"
        return "" if self.digests == now.digests else f"{self.rows_of(self.rows // self.block)} changed"

    def digest(self, number: int) -> bytes:
        """Return the digest of block `number`."""
        return self.digests[number * DIGEST_BYTES :][:DIGEST_BYTES]

    def rows_of(self, number: int) -> str:
        """Return the rows of block `number` in words."""
        first, last = number * self.block, min((number + 1) * self.block, self.rows) - 1
        return f"row {first}" if first == last else f"one of the rows {first} to {last}"


class RowCheck:
    """Compares the rows of a source with those with which the run began, each block when one of its rows is used."""

    def __init__(self, source: Source, begun: RowDigests) -> None:
        self._source, self._begun = source, begun
        self._known: set[int] = set()

    def check(self, index: int) -> None:
        """Raise SourceChanged if the block of row `index` has changed. A row that was added later is not checked."""
        begun = self._begun
        number = index // begun.block
        if index >= begun.rows or number in self._known:
            return
        first = number * begun.block
        rows = range(first, min(first + begun.block, begun.rows))
        made = _Digests(len(rows), begun.block)
        for index in rows if len(self._source) >= rows.stop else ():
            made.add(self._source.content(index))
        if made.finish() != begun.digest(number):
            raise SourceChanged(
                f"source {self._source.name!r}: {begun.rows_of(number)} changed since the run began; restore the rows "
                "and resume the run, or begin a new run"
            )
        self._known.add(number)


def read_rows(
    source: Source, most: int | None = None, like: RowDigests | None = None
) -> tuple[list[RowError], RowDigests]:
    """Read every row once. Return the unusable rows, and the digests of all rows or of the first `most`.

    With `like`, only as many rows have digests as in `like`, and the digests are of as many rows each.
    """
    limits = (most, like.rows if like is not None else None)
    rows = min([len(source), *(limit for limit in limits if limit is not None)])
    block = like.block if like is not None else max(1, -(-rows // MOST_DIGESTS))
    digests = _Digests(rows, block)
    return source.validate(digests.add), RowDigests(rows, block, digests.finish())


class _Digests:
    """Takes the rows of a source one by one."""

    def __init__(self, rows: int, block: int) -> None:
        self._numbers = iter(range(1, rows + 1))
        self._rows, self._block = rows, block
        self._hash = xxhash.xxh3_64()
        self._digests: list[bytes] = []

    def add(self, row: bytes) -> None:
        number = next(self._numbers, 0)
        if not number:
            return
        self._hash.update(row + b"\n")
        if number % self._block == 0 or number == self._rows:
            self._digests.append(self._hash.digest())
            self._hash = xxhash.xxh3_64()

    def finish(self) -> bytes:
        return b"".join(self._digests)
