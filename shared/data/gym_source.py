"""`reasoning-gym:<dataset>?size=..&seed=..`: procedural tasks from the reasoning-gym library as rows. They are made in
another process, because the hash seed of this process is arbitrary.
"""

from __future__ import annotations

from importlib import metadata

from shared.data.gym import EXTRA, GYM_KEY, PACKAGE
from shared.data.gym_process import RowMaker
from shared.data.source import OnRow, Row, RowError, check_index, require


class GymSource:
    """Rows `{"id", "prompt", "answer", "reasoning_gym"}`. The query may set `size` (default 1000) and `seed` (default
    0)."""

    def __init__(self, name: str, *, where: str) -> None:
        require(PACKAGE, EXTRA, f"{where}: source {name!r}")
        self.name = name
        self._release = metadata.version(PACKAGE.replace("_", "-"))
        self._maker = RowMaker(name, where=where)

    def __len__(self) -> int:
        return self._maker.rows

    def row(self, index: int) -> Row:
        check_index(index, len(self), self.name)
        entry = self._maker.entry(index)
        return {
            "id": f"{self.name}#{index}",
            "prompt": entry["question"],
            "answer": entry["answer"],
            GYM_KEY: {"source": self.name, "index": index},
        }

    def place(self, index: int) -> str:
        return f"{self.name} row {index}"

    def content(self, index: int) -> bytes:
        """Return the index and the release of the library, because making all rows would take too long."""
        return f"{PACKAGE} {self._release}: {index}".encode()

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        """Return no errors, because making all rows to check them would take too long."""
        if on_row is not None:
            for index in range(len(self)):
                on_row(self.content(index))
        return []
