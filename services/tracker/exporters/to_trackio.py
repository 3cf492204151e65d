"""Exports one run to trackio. Trackio's step is the position in our run's history; `training_step` and `lineage` are
ordinary metrics.

The trackio dashboard can use a metric such as `training_step` as its x-axis. Rows are sent to trackio's storage or to
its server. Each row has its own id, so trackio ignores a row that it already holds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
from trackio.alerts import AlertLevel
from trackio.remote_client import RemoteClient
from trackio.sqlite_storage import SQLiteStorage

from services.tracker.exporter import End, Note, Subject, TrackerRefused
from services.tracker.samples import SampleTable
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Trackio

TIMEOUT_S = 20.0
STEP = "training_step"
_REFUSED = frozenset({400, 401, 403})
"""Status codes of a server that does not accept the write token."""


class TrackioExporter:
    """A run in a trackio project, in this machine's database or on a server."""

    SURE = True

    def __init__(self, section: Trackio) -> None:
        self._project, self._url = section.project, section.url
        self._server: RemoteClient | None = None
        self.see = ""
        self._subject: Subject

    def open(self, subject: Subject) -> int:
        self._subject = subject
        folder = os.environ.get("TRACKIO_DIR")
        place = f"TRACKIO_DIR={shlex.quote(folder)} " if folder else ""
        self.see = self._url or f"{place}trackio show --project {shlex.quote(self._project)}"
        if self._url is not None:
            token = os.environ.get("TRACKIO_WRITE_TOKEN")
            self._server = RemoteClient(self._url, write_token=token, httpx_kwargs={"timeout": TIMEOUT_S})
        return subject.sent

    def send(self, rows: Sequence[CommittedRow]) -> None:
        if not rows:
            return
        configuration = {
            **self._subject.configuration,
            "_Username": None,
            "_Created": datetime.now(UTC).isoformat(),
            "_Group": None,
        }
        logs = [self._log(str(row.position), row.position, _metrics(row)) for row in rows]
        if rows[0].position == 0:
            logs[0]["config"] = configuration
        self._deliver(logs)

    def annotate(self, note: Note) -> None:
        level = AlertLevel.WARN if note.serious else AlertLevel.INFO
        alert = {
            "title": note.title,
            "text": note.text,
            "level": level.value,
            "step": note.position,
            "timestamp": datetime.now(UTC).isoformat(),
            "alert_id": f"{self._subject.id}-{note.key}",
        }
        if self._server is not None:
            self._call(self._server, "/bulk_alert", alerts=[self._entry() | alert])
            return
        SQLiteStorage.bulk_alert(
            project=self._project,
            run=self._subject.name,
            run_id=self._subject.id,
            **{f"{name}s": [value] for name, value in alert.items()},
        )

    def show(self, table: SampleTable) -> None:
        cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        metrics = {"samples": {"_type": "trackio.table", "_value": cells}}
        self._deliver([self._log(f"samples-{table.position}", table.position, metrics)])

    def close(self, end: End) -> None:
        """Do nothing, because nothing is open and trackio has no run state. A note records the end of the run."""

    def _log(self, key: str, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        log = {"metrics": metrics, "step": step, "config": None, "log_id": f"{self._subject.id}-{key}"}
        return self._entry() | log

    def _deliver(self, logs: list[dict[str, Any]]) -> None:
        if self._server is not None:
            self._call(self._server, "/bulk_log", logs=logs)
            return
        SQLiteStorage.bulk_log(
            project=self._project,
            run=self._subject.name,
            run_id=self._subject.id,
            metrics_list=[log["metrics"] for log in logs],
            steps=[log["step"] for log in logs],
            config=logs[0]["config"],
            log_ids=[log["log_id"] for log in logs],
        )

    def _entry(self) -> dict[str, Any]:
        return {"project": self._project, "run": self._subject.name, "run_id": self._subject.id}

    def _call(self, server: RemoteClient, name: str, **arguments: Any) -> None:
        try:
            server.predict(api_name=name, hf_token=None, **arguments)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in _REFUSED:
                text = (
                    f"{self._url}: refused ({error.response.text[:200]}); set TRACKIO_WRITE_TOKEN to the server's token"
                )
                raise TrackerRefused(text) from None
            raise


def _metrics(row: CommittedRow) -> dict[str, float]:
    """Return the values of a row by name. trackio reserves the name `step` for its own step."""
    values = {STEP if name == "step" else name: value for name, value in row.values.items()}
    return {**values, "lineage": row.lineage}
