"""The interface of a source of dataset rows, and the checks that a usable row must pass. The module performs no I/O.

A row is a dict ``{"prompt": "text" | [{"role", "content"}...], "answer"?, "id"?, "tools"?, anything else}``. Its index
is part of its task id. Bad rows also have an index, so dropping a row does not renumber the others.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

Row = dict[str, Any]
OnRow = Callable[[bytes], None]

SHOWN_CHARS = 60


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


def content_text(message: Mapping[str, Any]) -> Any:
    """Return the content of a message. A list of text parts is joined into one text; another list stays as it is."""
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content


def not_text(content: list[object]) -> str:
    """Return what the first part of a message's content is that is not text, or an empty string."""
    for number, part in enumerate(content):
        if not _is_text(part):
            kind = part.get("type", "an object") if isinstance(part, dict) else _json_type(part)
            return f"part {number} of its content is no text but {str(kind)[:40]}"
    return ""


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    )


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
        # A list contains parts, whose texts are joined; a turn that only calls tools has no content.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f'prompt message {number} has no content; a message is {{"role": ..., "content": ...}}'
        if isinstance(content, list) and (part := not_text(content)):
            return f"prompt message {number}: {part}; a policy is trained on text only"
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
