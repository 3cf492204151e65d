"""`builtin:addition`: two-digit additions, `"47+85="` -> `"132"`. The rows never change between releases."""

from __future__ import annotations

import hashlib

from shared.data.source import OnRow, Row, RowError, check_index, encoded

_TEST_ROWS = 256


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
