"""Decides when spare processes are started, which processes start from a spare, and when a kind of spare is given up.

It uses no process, socket or clock. There is at most one spare of a kind. One transition is missing on purpose: a kind
of spare that was given up is not tried again, because its imports would fail again; its processes start without spares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from launch.supervisor.state import WINDOW_S, describe_exit

KILL_LIMIT = 3
"""Number of kills within `WINDOW_S` at which a kind of spare is given up, because memory may be short."""


class SpareKind(NamedTuple):
    """Settings that are fixed before a process imports anything. A spare can only become a process of its own kind."""

    service: str
    threads: int
    gpus: str | None
    """CUDA_VISIBLE_DEVICES, or None for the launcher's value."""


@dataclass
class Spare:
    """A spare process that no service has used yet."""

    pid: int
    warm: bool = False
    """Whether the spare has imported everything."""


class SpareRules:
    """The spares of one run."""

    def __init__(self, kinds: Iterable[SpareKind]) -> None:
        self.spares: dict[SpareKind, Spare] = {}
        self._kills: dict[SpareKind, deque[float]] = {kind: deque() for kind in kinds}

    @property
    def complete(self) -> bool:
        """Whether there is a warm spare of every kind that was not given up."""
        return all(kind in self.spares and self.spares[kind].warm for kind in self._kills)

    def due(self, *, calm: bool) -> SpareKind | None:
        """Return the kind of spare to start next, or None.

        Return None unless the run is `calm`, because imports would slow down a starting process. Only one spare imports
        at a time, so that the first is warm early.
        """
        if not calm or not all(spare.warm for spare in self.spares.values()):
            return None
        return next((kind for kind in self._kills if kind not in self.spares), None)

    def started(self, kind: SpareKind, pid: int) -> None:
        self.spares[kind] = Spare(pid)

    def warmed(self, kind: SpareKind) -> None:
        """Note that the spare of `kind` has imported everything."""
        self.spares[kind].warm = True

    def take(self, kind: SpareKind) -> bool:
        """Return whether a process of `kind` can start from the spare. If so, forget the spare.

        A spare that is still importing is not used, because the process would wait for imports at the lowest priority.
        """
        if kind not in self.spares or not self.spares[kind].warm:
            return False
        del self.spares[kind]
        return True

    def exited(self, kind: SpareKind, status: int, now: float) -> str:
        """Note that the spare of `kind` has exited. Return the cause if the kind is given up, or an empty string."""
        self.spares.pop(kind, None)
        if status >= 0:
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
