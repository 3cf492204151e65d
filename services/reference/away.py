"""Says for how long a teacher's server has been away. It imports no model library."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Silence:
    """The server has not answered since `began` (monotonic seconds)."""

    began: float
    tries: int
    error: str


class Away:
    """Whether the server is away. The compute thread writes it, and any thread may read `silence`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self.silence: Silence | None = None
        self._clock = clock

    def refused(self, error: str) -> None:
        silence = self.silence
        began, tries = (self._clock(), 0) if silence is None else (silence.began, silence.tries)
        self.silence = Silence(began, tries + 1, error)

    def answered(self) -> None:
        self.silence = None

    def since_s(self, silence: Silence) -> float:
        return self._clock() - silence.began

    def over(self) -> str:
        """Return why the run must not wait any longer, or an empty string."""
        silence = self.silence
        if silence is None or self.since_s(silence) <= self.limit_s:
            return ""
        return (
            f"the teacher's server has not answered for {self.limit_s:g} s (reward.retry.limit_s) in {silence.tries} "
            f"tries: {silence.error}; repair the server, then resume"
        )
