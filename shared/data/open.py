"""Opens a source by its name in the topology. A library is imported only for the kind of source that needs it.

- ``builtin:addition`` and ``builtin:addition?split=test``: two-digit additions, ``"47+85="`` -> ``"132"``.
- ``jsonl:/path/file.jsonl``: one JSON object per line; blank lines are skipped.
- ``parquet:/path/file.parquet``: the rows of a Parquet file (extra ``data``).
- ``datasets:/path/folder`` with an optional ``?split=name``: output of ``Dataset.save_to_disk`` (extra ``data``).
- ``hub:owner/name/path``: files in a data set on the Hugging Face hub, which `shared.topology.hub` turns into one of
  the file sources above.
- ``reasoning-gym:dataset?size=1000&seed=0``: tasks from the reasoning-gym library (extra ``rewards``).

A relative path is relative to the working directory. In the name of a JSONL or Parquet file, ``*`` matches any
characters: the source then consists of the rows of all matching files, in order of file name. ``?prompt=question``
after a path uses the field ``question`` as the prompt.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from shared.data.jsonl import JsonlSource
from shared.data.source import DataError, OnRow, Row, RowError, Source, check_index, encoded, nearest

FORMS = (
    "builtin:<name>, jsonl:<path>, parquet:<path>, datasets:<folder>, hub:<owner>/<name>/<path> or "
    "reasoning-gym:<data set>"
)
_TEST_ROWS = 256
_PARAMETERS = re.compile(r"(?P<path>.+?)\?(?P<query>\w+=[^/?]*)", re.DOTALL)


def open_source(source: str, *, where: str) -> Source:
    """Open `source`. Every error about the source itself begins with `where`, the file:line that names the source.

    Raises DataError for an unknown kind, builtin or parameter, for a library that is not installed, and for a file
    that is missing or has no rows. A bad row is not an error here: see `Source.validate`.
    """
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        name, _, query = rest.partition("?")
        if name != "addition":
            raise DataError(f"{where}: source {source!r} names no builtin{nearest(name, ['addition'])}")
        split = _parameters(source, query, where, ("split",)).get("split", "train")
        if split not in ("train", "test"):
            raise DataError(f"{where}: source {source!r} has split {split!r}; the splits are train and test")
        return AdditionSource(split, name=source)
    if kind in ("jsonl", "parquet", "datasets"):
        path, query = split_parameters(rest)
        valid = ("prompt", "split") if kind == "datasets" else ("prompt",)
        given = _parameters(source, query, where, valid)
        prompt = given.get("prompt", "prompt")
        if kind == "datasets":
            from shared.data.tables import open_saved_dataset

            return open_saved_dataset(path, given.get("split", ""), prompt, name=source, where=where)
        files = [str(file) for file in matching_files(path)] or [path]
        if kind == "jsonl":
            parts: list[Source] = [JsonlSource(file, prompt, name=source, where=where) for file in files]
        else:
            from shared.data.tables import open_parquet

            parts = [open_parquet(file, prompt, name=source, where=where) for file in files]
        return parts[0] if len(parts) == 1 else JoinedSource(parts, name=source)
    if kind == "reasoning-gym":
        from shared.data.gym_process import GymSource

        return GymSource(source, where=where)
    raise DataError(f"{where}: source {source!r} has an unknown kind; write {FORMS}")


def _parameters(source: str, query: str, where: str, valid: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of a source. Raises DataError for an unknown parameter."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in valid:
            raise DataError(f"{where}: source {source!r} has unknown parameter {key!r}{nearest(key, valid)}")
    return given


class AdditionSource:
    """Every pair of two-digit numbers once, in a fixed shuffled order: 256 `test` rows and 7,844 `train` rows."""

    def __init__(self, split: str, *, name: str) -> None:
        # Order by a digest, not by random.shuffle, whose result may differ between Python versions.
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        pairs.sort(key=lambda ab: hashlib.blake2b(b"%d+%d" % ab, digest_size=8).digest())
        self._pairs = pairs[:_TEST_ROWS] if split == "test" else pairs[_TEST_ROWS:]
        self._split = split
        self.name = name

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> Row:
        check_index(index, len(self), self.name)
        a, b = self._pairs[index]
        return {"id": f"addition-{self._split}-{index}", "prompt": f"{a}+{b}=", "answer": str(a + b)}

    def place(self, index: int) -> str:
        return f"{self.name} row {index}"

    def content(self, index: int) -> bytes:
        return encoded(self.row(index))

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        if on_row is not None:
            for index in range(len(self)):
                on_row(self.content(index))
        return []


class JoinedSource:
    """The rows of one or more `parts`, in order."""

    def __init__(self, parts: Sequence[Source], *, name: str) -> None:
        self.name = name
        self._parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        part, start = self._part(index)
        return part.row(index - start)

    def place(self, index: int) -> str:
        part, start = self._part(index)
        return part.place(index - start)

    def content(self, index: int) -> bytes:
        part, start = self._part(index)
        return part.content(index - start)

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        return [
            dataclasses.replace(error, index=start + error.index)
            for part, start in zip(self._parts, self._starts, strict=False)
            for error in part.validate(on_row)
        ]

    def _part(self, index: int) -> tuple[Source, int]:
        check_index(index, len(self), self.name)
        at = bisect.bisect_right(self._starts, index) - 1
        return self._parts[at], self._starts[at]


def split_parameters(rest: str) -> tuple[str, str]:
    """Return the path and the query from `rest`, the text that follows the kind of a source. The query may be empty."""
    match = _PARAMETERS.fullmatch(rest)
    return (match["path"], match["query"]) if match else (rest, "")


def matching_files(path: str) -> list[Path]:
    """Return the file at `path`, or all files that match, ordered by name, if the last part of the path contains a
    `*`."""
    file = Path(path)
    return sorted(file.parent.glob(file.name)) if "*" in file.name else [file]
