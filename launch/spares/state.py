"""Decides when spare processes are started, which processes are forked from them, and when a kind of spare is
abandoned.

It uses no process, socket or clock. There is at most one spare of a kind. One transition is missing on purpose: a kind
of spare that was abandoned is not tried again, because its imports would fail again; its services start without a
spare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from launch.processes.plan import OUTSIDE_KILLS, describe_exit

WINDOW_S = 300.0
KILL_LIMIT = 3
"""If spares of a kind are killed this many times within `WINDOW_S`, the kind is abandoned, because memory may be
short."""


class SpareKind(NamedTuple):
    """The services that are forked from the same spare, and the imports of that spare."""

    services: tuple[str, ...]
    imports: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.services)


@dataclass
class Spare:
    """What is known about a spare process."""

    pid: int
    warm: bool = False
    """Whether the spare has imported everything and can be forked."""


class SpareRules:
    """Keeps track of the spares of one run."""

    def __init__(self, kinds: Iterable[SpareKind]) -> None:
        self.spares: dict[SpareKind, Spare] = {}
        self._kills: dict[SpareKind, deque[float]] = {kind: deque() for kind in kinds}

    @property
    def missing(self) -> list[SpareKind]:
        """The kinds that have no spare and have not been abandoned."""
        return [kind for kind in self._kills if kind not in self.spares]

    @property
    def complete(self) -> bool:
        """Whether there is a warm spare of every kind that has not been abandoned."""
        return not self.missing and all(spare.warm for spare in self.spares.values())

    def started(self, kind: SpareKind, pid: int) -> None:
        self.spares[kind] = Spare(pid)

    def warmed(self, kind: SpareKind) -> None:
        """Note that the spare of `kind` has imported everything."""
        self.spares[kind].warm = True

    def lost(self, kind: SpareKind) -> None:
        """Note that the spare of `kind` does not answer and is being killed."""
        self.spares[kind].warm = False

    def usable(self, kind: SpareKind) -> bool:
        """Return whether processes of `kind` can be forked from its spare."""
        return kind in self.spares and self.spares[kind].warm

    def exited(self, kind: SpareKind, status: int, now: float) -> str:
        """Note that the spare of `kind` has exited. Return the cause if the kind is abandoned, or an empty string."""
        self.spares.pop(kind, None)
        if kind not in self._kills:
            return ""
        if status not in OUTSIDE_KILLS:
            return self.give_up(kind, describe_exit(status))
        kills = self._kills[kind]
        kills.append(now)
        while kills[0] < now - WINDOW_S:
            kills.popleft()
        if len(kills) < KILL_LIMIT:
            return ""
        return self.give_up(kind, f"{describe_exit(status)} (kill {len(kills)} in {WINDOW_S:g} s, limit {KILL_LIMIT})")

    def give_up(self, kind: SpareKind, cause: str) -> str:
        """Start no further spares of `kind`. Return `cause`."""
        self._kills.pop(kind, None)
        return cause
