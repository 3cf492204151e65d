"""Presents several sources as one: the rows of the second follow those of the first, and so on."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from shared.data.source import OnRow, Row, RowError, Source, check_index


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
