"""Digests of the rows of a source, by which a resumed run recognizes the rows with which it began."""

from __future__ import annotations

import msgspec
import xxhash

from shared.data.source import RowError, Source, SourceChanged

DIGEST_BYTES = 8
MOST_DIGESTS = 1 << 16
"""Maximum number of digests of one source, 512 KiB in all. A larger source has one digest for several rows."""


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
