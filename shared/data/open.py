"""Opens a source by its name in the topology. A library is imported only for the kind of source that needs it.

- ``builtin:addition`` and ``builtin:addition?split=test``: two-digit additions, ``"47+85="`` -> ``"132"``.
- ``builtin:addition_pairs``, with the same splits: the same rows with a chosen and a rejected answer.
- ``jsonl:/path/file.jsonl``: one JSON object per line; blank lines are skipped.
- ``parquet:/path/file.parquet``: the rows of a Parquet file.
- ``datasets:/path/folder`` with an optional ``?split=name``: output of ``Dataset.save_to_disk``.
- ``hub:owner/name/path``: files in a data set on the Hugging Face hub, which `shared.topology.hub` turns into one of
  the file sources above.
- ``reasoning-gym:dataset?size=1000&seed=0``: tasks from the reasoning-gym library (extra ``rewards``).

A relative path is relative to the working directory. In the path of a JSONL or Parquet file, ``*`` matches any
characters of a name, and ``**`` any folders: the source then consists of the rows of all matching files, in order of
their paths.

``?prompt=question&answer=reward_model.ground_truth`` after a path takes the prompt and the answer from other fields.
Dots lead into nested objects, except in a key that contains them. The other fields
(``chosen``, ``rejected``, ``id``, ``tools``) can be taken in the same way.
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
from shared.data.source import FIELDS, DataError, OnRow, Row, RowError, Source, check_index, encoded, nearest

FORMS = (
    "builtin:<name>, jsonl:<path>, parquet:<path>, datasets:<folder>, hub:<owner>/<name>/<path> or "
    "reasoning-gym:<data set>"
)
BUILTINS = ("addition", "addition_pairs")
_TEST_ROWS = 256
_MISTAKES = (-10, -60, -1, 60, 1, -60, 10, 60)
_PARAMETERS = re.compile(r"(?P<path>.+?)\?(?P<query>\w+=[^/?]*)", re.DOTALL)


def open_source(source: str, *, where: str) -> Source:
    """Open `source`. Every error about the source itself begins with `where`, the file:line that names the source.

    Raises DataError for an unknown kind, builtin or parameter, for a library that is not installed, and for a file
    that is missing or has no rows. A bad row is not an error here: see `Source.validate`.
    """
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        name, _, query = rest.partition("?")
        if name not in BUILTINS:
            raise DataError(f"{where}: source {source!r} names no builtin{nearest(name, BUILTINS)}")
        split = _parameters(source, query, where, ("split",)).get("split", "train")
        if split not in ("train", "test"):
            raise DataError(f"{where}: source {source!r} has split {split!r}; the splits are train and test")
        return AdditionSource(split, name=source, with_answers=name == BUILTINS[1])
    if kind in ("jsonl", "parquet", "datasets"):
        path, query = split_parameters(rest)
        given = _parameters(source, query, where, (*FIELDS, "split") if kind == "datasets" else FIELDS)
        fields = {name: given[name] for name in FIELDS if name in given}
        if kind == "datasets":
            from shared.data.tables import open_saved_dataset

            return open_saved_dataset(path, given.get("split", ""), fields, name=source, where=where)
        files = matching_files(path)
        if not files:
            raise DataError(f"{where}: source {source!r}: {absent(path)}")
        if kind == "jsonl":
            parts: list[Source] = [JsonlSource(str(file), fields, name=source, where=where) for file in files]
        else:
            from shared.data.tables import open_parquet

            parts = [open_parquet(str(file), fields, name=source, where=where) for file in files]
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

    def __init__(self, split: str, *, name: str, with_answers: bool = False) -> None:
        """With `with_answers`, a row also has a chosen answer, the sum, and a rejected one, which is wrong by 1, 10 or
        60."""
        # Order by a digest, not by random.shuffle, whose result may differ between Python versions.
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        pairs.sort(key=lambda ab: hashlib.blake2b(b"%d+%d" % ab, digest_size=8).digest())
        self._pairs = pairs[:_TEST_ROWS] if split == "test" else pairs[_TEST_ROWS:]
        self._split = split
        self._with_answers = with_answers
        self.name = name

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> Row:
        check_index(index, len(self), self.name)
        a, b = self._pairs[index]
        row: Row = {"id": f"addition-{self._split}-{index}", "prompt": f"{a}+{b}=", "answer": str(a + b)}
        if self._with_answers:
            mistake = _MISTAKES[index % len(_MISTAKES)]
            wrong = a + b + mistake if a + b + mistake >= 0 else a + b - mistake
            row |= {"chosen": str(a + b), "rejected": str(wrong)}
        return row

    def place(self, index: int) -> str:
        return f"{self.name} row {index}"

    def content(self, index: int) -> bytes:
        return encoded(self.row(index))

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        if on_row is not None:
            for index in range(len(self)):
                row = self.row(index)
                on_row(encoded(row), row)
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
    """Return the file at `path`, or all files that match, in order of their paths, if the path contains a `*`."""
    folder, pattern = pattern_of(path)
    return sorted(file for file in folder.glob(pattern) if not file.is_dir()) if pattern else [folder]


def pattern_of(path: str) -> tuple[Path, str]:
    """Return the folder above the first part of `path` that contains a `*`, and the rest of the path. Without a `*`,
    return the whole path and an empty string."""
    file = Path(path)
    first = next((at for at, part in enumerate(file.parts) if "*" in part), len(file.parts))
    return Path(*file.parts[:first]), "/".join(file.parts[first:])


def absent(path: str) -> str:
    """Return the text about files that do not exist: the pattern and the folder in which nothing matches it."""
    folder, pattern = pattern_of(path)
    if not pattern:
        return f"no file {folder}"
    return f"no file matches {pattern} in {folder}" + ("" if folder.is_dir() else ", which is not a folder")
