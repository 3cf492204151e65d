"""Turns what detectors see into warnings: one for each episode of a condition.

An episode begins when a detector finds its condition. It ends when the condition was absent for some observations in a
row, by a bound that is easier to keep than the one that began it (hysteresis), so that a value that wavers around a
bound warns once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sighting:
    """One condition that a detector sees now."""

    text: str
    """The observation, with numbers, in one line."""
    remedy: str
    """The advice, with the topology key to change, in one line."""
    about: str = ""
    """The service or the evaluation set that it is about, empty if it is about the whole run."""


class Episodes:
    """The episodes under way, by kind and by what they are about."""

    def __init__(self, over_after: int) -> None:
        """`over_after` is the number of observations without the condition after which an episode is over."""
        self._over_after = over_after
        self._absent: dict[tuple[str, str], int] = {}

    def begin(self, kind: str, about: str) -> None:
        """Note an episode that has begun before, for example in an earlier life of the monitor."""
        self._absent[kind, about] = 0

    def held(self, kind: str) -> frozenset[str]:
        """Return what the episodes of a kind are about. Their detector applies its lower bound to these."""
        return frozenset(about for each, about in self._absent if each == kind)

    def observe(self, kind: str, found: Iterable[Sighting]) -> list[Sighting]:
        """Take everything that a detector finds now. Return the sightings that begin an episode."""
        now = {sighting.about: sighting for sighting in found}
        begun = [sighting for about, sighting in now.items() if (kind, about) not in self._absent]
        for about in self.held(kind) - set(now):
            self._absent[kind, about] += 1
            if self._absent[kind, about] >= self._over_after:
                del self._absent[kind, about]
        for about in now:
            self._absent[kind, about] = 0
        return begun
