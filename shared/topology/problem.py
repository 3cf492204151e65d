"""Represents the problems of a topology, one line each. The checks decide what counts as a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.unusable import Unusable

SHOWN_CHARS = 80
Path = tuple[str | int, ...]
Found = Iterator[tuple[Path, str]]
"""The findings of a check: the path of a key, and the value, the limit and the remedy in one line."""


def dotted(path: Path) -> str:
    """Join a path in the form that `--set` accepts: `("algorithm", "loss", "clip", 1)` -> `algorithm.loss.clip.1`."""
    return ".".join(str(part) for part in path)


def shown(value: object) -> str:
    """Return `value` for a one-line error: its repr, truncated to `SHOWN_CHARS` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


@dataclass(frozen=True)
class Problem:
    """One problem: `where` is `file:line` or `--set a.b=v`, and `path` is the path of the key concerned."""

    where: str
    path: Path
    message: str

    def __str__(self) -> str:
        parts = [self.where, dotted(self.path), self.message] if self.path else [self.where, self.message]
        return " ".join(": ".join(parts).splitlines())


class TopologyError(Unusable):
    """A topology that cannot run. `problems` holds every problem found; `str()` gives one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
