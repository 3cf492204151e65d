"""The processes of a run, merged from the supervisor's reports about them and their own reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from proto.messages import ProcessRow, TopicRow

Values = Mapping[str, float | str]
UNKNOWN = "?"
SILENT_S = 5.0
"""Seconds without a report after which a process that should be running counts as silent. Processes report every
second."""
RESTARTED_S = 3.0
"""Seconds during which a restarted process counts as changing, because it may be READY before the end of its previous
life is reported."""


class Health(StrEnum):
    """The health of a process."""

    WELL = "well"
    CHANGING = "changing"
    """The process is starting, is draining, is waiting for its turn to start, or was restarted just now."""
    WRONG = "wrong"
    """The process has failed, is waiting to be restarted, or is running but has fallen silent."""
    ENDED = "ended"


_HEALTH = {
    "READY": Health.WELL,
    "STARTING": Health.CHANGING,
    "WAITING": Health.CHANGING,
    "DRAINING": Health.CHANGING,
    "BACKOFF": Health.WRONG,
    "FAILED": Health.WRONG,
    "STOPPED": Health.ENDED,
    "DRAINED": Health.ENDED,
}


@dataclass(frozen=True)
class ServiceView:
    """One process. Values that have not been reported are None."""

    name: str
    state: str
    health: Health
    cause: str
    host: str
    incarnation: str
    pid: int | None
    restarts: int | None
    rss_bytes: float | None
    cpu_share: float | None
    """CPU time over wall time: 1.0 is one core."""
    gpu_bytes: float | None
    """GPU memory that the process has reserved, or None if it uses none."""
    progress_age_s: float | None
    """Seconds since its work last advanced, or None if it has done no work or has no progress counter."""
    silent_s: float | None
    """Seconds since its last report about itself."""


class ServiceBook:
    """The reported values of each process."""

    def __init__(self) -> None:
        self._supervised: dict[str, Values] = {}
        self._restarted: dict[str, float] = {}
        self._own: dict[str, tuple[float, Values]] = {}
        self._states: dict[str, tuple[float, Values]] = {}

    def supervised(self, name: str, at: float, values: Values) -> None:
        """Record the supervisor's report about a process (topic `cluster/process`).

        The cause of a restart is kept when the process later ends without a cause.
        """
        before = self._supervised.get(name, values)
        restarts = _number(values, "restarts") or 0
        if restarts > (_number(before, "restarts") or 0):
            self._restarted[name] = at
        if restarts and not _text(values, "cause"):
            values = {**values, "cause": _text(before, "cause")}
        self._supervised[name] = values

    def own(self, name: str, at: float, values: Values) -> None:
        """Record a process's report about its resources (topic `process`)."""
        self._own[name] = (at, values)

    def state(self, name: str, at: float, values: Values) -> None:
        """Record a process's report about its state (topic `service`)."""
        self._states[name] = (at, values)

    def views(self, now: float) -> list[ServiceView]:
        """Return all processes by name. `now` is in seconds since 1970."""
        return [self._view(name, now) for name in sorted({*self._supervised, *self._own, *self._states})]

    def _view(self, name: str, now: float) -> ServiceView:
        supervised = self._supervised.get(name, {})
        own_at, own = self._own.get(name, (None, {}))
        state_at, stated = self._states.get(name, (None, {}))
        state = _text(supervised, "state") or _text(stated, "state") or UNKNOWN
        health = _HEALTH.get(state, Health.CHANGING)
        heard = [at for at in (own_at, state_at) if at is not None]
        silent_s = max(0.0, now - max(heard)) if heard else None
        runs = health in (Health.WELL, Health.CHANGING) and state != "WAITING"
        if health is Health.WELL and now - self._restarted.get(name, -RESTARTED_S) < RESTARTED_S:
            health = Health.CHANGING
        if runs and own_at is not None and silent_s is not None and silent_s > SILENT_S:
            health = Health.WRONG
        progress_s = _number(own, "progress_age_s")
        progresses = progress_s is not None and progress_s >= 0 and own_at is not None
        pid = _number(supervised, "pid") or _number(own, "pid")
        restarts = _number(supervised, "restarts")
        return ServiceView(
            name=name,
            state=state,
            health=health,
            cause=_text(supervised, "cause") or _text(stated, "cause"),
            host=_text(own, "host"),
            incarnation=_text(supervised, "incarnation") or _text(own, "incarnation"),
            pid=int(pid) if pid else None,
            restarts=int(restarts) if restarts is not None else None,
            rss_bytes=_number(own, "rss_bytes") if runs else None,
            cpu_share=_number(own, "cpu_share") if runs else None,
            gpu_bytes=_number(own, "gpu_bytes") if runs else None,
            progress_age_s=(progress_s or 0.0) + now - (own_at or 0.0) if progresses and runs else None,
            silent_s=silent_s if runs else None,
        )


def _number(values: Values, name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _text(values: Values, name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def process_rows(processes: Iterable[ProcessRow], at: float) -> list[TopicRow]:
    """Return a row for each process, attributed to that process. `at` is in seconds since 1970."""
    return [
        TopicRow(
            service=row.service,
            instance=row.instance,
            topic="cluster/process",
            at=at,
            values={
                "state": row.state,
                "pid": row.pid,
                "incarnation": f"{row.incarnation:016x}",
                "restarts": row.restarts,
                "cause": row.cause,
            },
        )
        for row in processes
    ]
