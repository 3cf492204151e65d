"""Turns the findings of detectors into warnings: one for each episode of a condition.

An episode begins when a detector finds the condition. It ends when the condition has been absent for several
observations in a row. While an episode lasts, a more lenient bound applies (hysteresis), so that a value that hovers
around a bound causes only one warning.
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
    """The service or the evaluation set that the sighting is about, or an empty string if it is about the whole run."""


class Episodes:
    """The ongoing episodes, by kind and subject."""

    def __init__(self, over_after: int) -> None:
        """`over_after` is the number of observations without the condition after which an episode is over."""
        self._over_after = over_after
        self._absent: dict[tuple[str, str], int] = {}

    def begin(self, kind: str, about: str) -> None:
        """Record an episode that began earlier, for example before the monitor restarted."""
        self._absent[kind, about] = 0

    def lasting(self, kind: str) -> frozenset[str]:
        """Return the subjects of a kind's ongoing episodes. The detector applies its second bound to these subjects."""
        return frozenset(about for absent, about in self._absent if absent == kind)

    def observe(self, kind: str, sightings: Iterable[Sighting]) -> list[Sighting]:
        """Record all current sightings of a detector. Return those that begin an episode."""
        now = {sighting.about: sighting for sighting in sightings}
        begun = [sighting for about, sighting in now.items() if (kind, about) not in self._absent]
        for about in self.lasting(kind) - set(now):
            self._absent[kind, about] += 1
            if self._absent[kind, about] >= self._over_after:
                del self._absent[kind, about]
        for about in now:
            self._absent[kind, about] = 0
        return begun
