"""The interface of a source of dataset rows, the checks that a usable row must pass, and the digests by which a resumed
run recognizes the rows with which it began. The module performs no I/O.

A row is a dict ``{"prompt": "text" | [{"role", "content"}...], "answer"?, "id"?, "tools"?, anything else}``. A row that
has `messages` in place of a prompt is a conversation: its prompt is what precedes the first answer. The index of a row
is part of its task id. Bad rows also have an index, so dropping a row does not renumber the others.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

Row = dict[str, Any]
OnRow = Callable[[bytes, Row | None], None]
"""Function that receives the content of a row, and the row unless it is unusable or was not made."""

ANSWER = "answer"
PAIR = ("chosen", "rejected")
"""The fields of a row with the better and the worse answer of a preference, in the order of the samples."""
FIELDS = ("prompt", "messages", ANSWER, *PAIR, "id", "tools")
"""Fields of a row whose values may be taken from another field of the file."""
SHOWN_CHARS = 60
MOST_ROW_BYTES = 64 << 20
"""Maximum size of a row. A larger one is unusable."""
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
        different ones. The content of a row that is too large is only its size and its beginning. Raises
        SourceLost."""

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        """Read every row once and return the unusable ones in order. `row` raises for exactly these. Raises SourceLost.

        `on_row`, if given, is called for each row, in order and with the unusable ones.
        """


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return the end of an error message about the unknown name `given`: the closest name, or the known ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1)
    shown = names if len(names) <= 12 else [*names[:12], f"and {len(names) - 12} more"]
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(shown)}"


def require(module: str, extra: str, what: str) -> None:
    """Raise DataError, which names the make target of the optional `extra`, if `module` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise DataError(f"{what} needs the package {module}; run `make setup-{extra}`")


def check_index(index: int, rows: int, name: str) -> None:
    """Raise IndexError unless 0 <= index < rows."""
    if not 0 <= index < rows:
        raise IndexError(f"source {name!r} has no row {index}: it has rows 0 to {rows - 1}")


def encoded(row: Any) -> bytes:
    """Return the content of a row that no file holds as bytes."""
    return msgspec.json.encode(row, enc_hook=repr)


def usable(row: Any, fields: Mapping[str, str], place: str, shown: Callable[[], str]) -> Row:
    """Return `row` with the value at each path of `fields` in the field of that name.

    Raises DataError, which shows the row as `shown` returns it, if a path leads nowhere or the rollout could not use
    the row.
    """
    problem = None
    if isinstance(row, dict) and fields:
        try:
            row = row | {name: value_at(row, path) for name, path in fields.items()}
        except LookupError as error:
            problem = str(error.args[0])
    if problem is None and isinstance(row, dict) and "prompt" not in row and "messages" in row:
        problem = _messages_problem("messages", row["messages"])
        if problem is None and not (prompt := before_answer(row["messages"])):
            problem = "messages begin with an answer; another message must precede it"
        elif problem is None:
            row = row | {"prompt": prompt}
    problem = problem or row_problem(row)
    if problem:
        raise DataError(f"{place}: {problem}: {cut(shown())}")
    made: Row = row
    return made


def cut(text: str) -> str:
    """Return the beginning of a row for a one-line error."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def too_large(place: str, nbytes: int) -> DataError:
    """Return the error for a row of `nbytes` bytes, or at least that many."""
    size, most = nbytes / (1 << 20), MOST_ROW_BYTES >> 20
    return DataError(
        f"{place}: a row of {size:.0f} MiB or more: a row may have {most} MiB; shorten it, or leave it out"
    )


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at `path`. A key that equals `path` comes first; otherwise dots separate keys of nested objects.

    Raises LookupError with a half-sentence that names the keys that exist.
    """
    node, rest, above = row, path, ""
    while rest not in node:
        heads = [rest[:at] for at, character in enumerate(rest) if character == "." and rest[:at] in node]
        keys = ", ".join(sorted(map(str, node))) or "none"
        if not heads:
            raise LookupError(f"row has no field {path!r} (keys {f'of {above}' if above else 'of the row'}: {keys})")
        head = heads[-1]
        above, below = f"{above}.{head}".lstrip("."), node[head]
        if not isinstance(below, dict):
            raise LookupError(f"row has no field {path!r}: {above} is {_json_type(below)}, not an object")
        node, rest = below, rest[len(head) + 1 :]
    return node[rest]


def content_text(message: Mapping[str, Any]) -> Any:
    """Return the content of a message. A list of text parts is joined into one text; another list stays as it is."""
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content


def answer_text(row: Mapping[str, Any], field: str) -> str:
    """Return the text of the answer in `field`: a value as text, or for `PAIR` also a list with the one message of the
    assistant.

    Raises ValueError if there is no such answer.
    """
    answer = row.get(field)
    if answer is None:
        if field == ANSWER:
            raise ValueError("row has no answer and no messages, from which loss cross_entropy learns")
        raise ValueError(f"row has no {field}: a preference needs {' and '.join(PAIR)}; it learns from nothing else")
    if field == ANSWER:
        return str(answer)
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = content_text(answer[0]) if answer[0].get("role") == "assistant" else answer
    if not isinstance(answer, str):
        raise ValueError(
            f"{field} must be text or a list with one message of the assistant, not {_json_type(answer)} "
            f"({cut(repr(answer))}); put earlier messages into the prompt"
        )
    return answer


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


def before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a conversation that precede its first answer."""
    return list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))


def is_conversation(row: Row) -> bool:
    """Return whether supervised fine-tuning learns all answers of the row's messages, and not one answer."""
    return "messages" in row and row.get(ANSWER) is None


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
    return _messages_problem("prompt", prompt)


def _messages_problem(field: str, messages: object) -> str | None:
    if not isinstance(messages, list):
        return f"{field} must be a list of messages, not {_json_type(messages)}"
    if not messages:
        return f"{field} is an empty list; it needs at least one message"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'{field} message {number} has no role; a message is {{"role": ..., "content": ...}}'
        content = message.get("content")
        # A list contains parts, whose texts are joined; a turn that only calls tools has no content.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f'{field} message {number} has no content; a message is {{"role": ..., "content": ...}}'
        if isinstance(content, list) and (part := not_text(content)):
            return f"{field} message {number}: {part}; a policy is trained on text only"
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


class LongestPrompt(NamedTuple):
    """The longest prompt of a source: its size as text, or as JSON if it consists of messages, and its row."""

    nbytes: int
    row: int


class RowsRead(NamedTuple):
    """The result of reading all rows of a source: the unusable rows, the digests, and the longest prompt among the rows
    with digests, or None if no row was made."""

    bad: list[RowError]
    digests: RowDigests
    longest: LongestPrompt | None


def read_rows(source: Source, most: int | None = None, like: RowDigests | None = None) -> RowsRead:
    """Read every row once. All rows have digests, or the first `most`.

    With `like`, only as many rows have digests as in `like`, and the digests are of as many rows each.
    """
    limits = (most, like.rows if like is not None else None)
    rows = min([len(source), *(limit for limit in limits if limit is not None)])
    block = like.block if like is not None else max(1, -(-rows // MOST_DIGESTS))
    digests, longest = _Digests(rows, block), _Longest(rows)

    def on_row(content: bytes, row: Row | None) -> None:
        digests.add(content)
        longest.add(row)

    bad = source.validate(on_row)
    return RowsRead(bad, RowDigests(rows, block, digests.finish()), longest.found)


def prompt_bytes(row: Row) -> int:
    """Return the size of a row's prompt in bytes: of its text, or of its messages as JSON."""
    prompt = row["prompt"]
    return len(prompt.encode() if isinstance(prompt, str) else encoded(prompt))


class _Longest:
    """Takes the rows of a source one by one, and finds the longest prompt among the first `rows`."""

    def __init__(self, rows: int) -> None:
        self._numbers = iter(range(rows))
        self.found: LongestPrompt | None = None

    def add(self, row: Row | None) -> None:
        index = next(self._numbers, None)
        if index is None or row is None:
            return
        nbytes = prompt_bytes(row)
        if self.found is None or nbytes > self.found.nbytes:
            self.found = LongestPrompt(nbytes, index)


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
