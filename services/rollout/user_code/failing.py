"""Reports failures of users' code: as a problem on the console while they last, and as tracebacks in the log."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from proto.messages import Trouble, TroubleKind
from services.rollout.rewards.score import Score

TEXT_CHARS = 900
MOST_LOGGED = 64
"""Maximum number of failures that are logged with a traceback before a lease succeeds again."""


class Failing:
    """Counts samples from the first failure until a whole lease succeeds."""

    def __init__(self, kind: TroubleKind, log: str) -> None:
        """`log` is the name of the logger."""
        self._kind = kind
        self._log = structlog.get_logger(log)
        self._failed = 0
        self._samples = 0
        self._last = ""
        self._logged: set[tuple[str, str]] = set()

    def count(self, scores: Sequence[Score]) -> None:
        """Count samples that have ended."""
        for score in scores:
            if score.value is None:
                self._failed += 1
                self._last = score.failure
                self._write(score)
        if self._failed:
            self._samples += len(scores)

    def lease_ended(self, *, well: bool) -> None:
        """Record that all samples of a lease have ended. `well` means that none of them failed."""
        if well:
            self._failed = self._samples = 0
            self._logged.clear()

    def troubles(self) -> list[Trouble]:
        """Return the problems to report in the heartbeat."""
        if not self._failed:
            return []
        text = f"{self._kind} failing: {self._failed} of {self._samples}, {self._last}"
        return [Trouble(self._kind, text[:TEXT_CHARS])]

    def _write(self, score: Score) -> None:
        key = (score.kind, score.trace or score.failure)
        if key not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(key)
            self._log.warning("sample failed", kind=str(score.kind), why=score.failure, exception=score.trace)
