"""Exports one run to MLflow. MLflow's step is the position in our run's history; our `step` and `lineage` are ordinary
metrics.

MLflow charts can use a metric such as `step` as their x-axis. A batch is stored as a whole, and each row ends with the
metric `tracker/row`, so the newest value of this metric shows which rows MLflow holds.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the feeder itself retries as long as necessary

import structlog
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException

from services.tracker.exporter import LINE_CHARS, End, Note, Subject, TrackerRefused
from services.tracker.redaction import flat
from services.tracker.samples import SampleTable
from shared.runfiles.logs import shorten
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Mlflow

BATCH_METRICS, BATCH_PARAMS = 1000, 100
"""Maximum sizes of a batch, set by MLflow's API."""
PARAM_CHARS, TAG_CHARS = 6000, 5000
ROW = "tracker/row"
ID = "rlbus.id"
_REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")
_STATUS = {"done": RunStatus.FINISHED, "failed": RunStatus.FAILED}


class MlflowExporter:
    """A run in an MLflow experiment."""

    SURE = True

    def __init__(self, section: Mlflow) -> None:
        self._section = section
        self.see = ""
        self._has_artifacts = True
        self._client: MlflowClient
        self._run = ""

    def open(self, subject: Subject) -> int:
        self._client = MlflowClient(self._section.uri)
        try:
            return self._open(subject)
        except MlflowException as error:
            if error.error_code in _REFUSED:
                why = f"{self._section.uri}: {error.error_code}: {shorten(str(error), LINE_CHARS)}"
                raise TrackerRefused(
                    f"{why} (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, of a "
                    "user who may write to the experiment)"
                ) from None
            raise

    def _open(self, subject: Subject) -> int:
        experiment = self._experiment()
        runs = self._client.search_runs([experiment], f"tags.`{ID}` = '{subject.id}'")
        tags = {ID: subject.id, "rlbus.path": str(subject.path)}
        run = runs[0] if runs else self._client.create_run(experiment, tags=tags, run_name=subject.name)
        self._run = run.info.run_id
        self.see = self._seen(experiment)
        if runs:
            self._client.update_run(self._run, status=RunStatus.to_string(RunStatus.RUNNING))
        wanted = {_key(name): value[:PARAM_CHARS] for name, value in flat(subject.configuration).items()}
        # MLflow refuses to change a parameter, so a resumed run keeps the parameters of its first start.
        new = iter([Param(name, value) for name, value in wanted.items() if name not in run.data.params])
        while batch := list(islice(new, BATCH_PARAMS)):
            self._client.log_batch(self._run, params=batch)
        return int(run.data.metrics.get(ROW, -1)) + 1

    def send(self, rows: Sequence[CommittedRow]) -> None:
        batch: list[Metric] = []
        for metrics in map(_metrics, rows):
            if len(batch) + len(metrics) > BATCH_METRICS:
                self._log(batch)
                batch = []
            batch += metrics
        self._log(batch)

    def annotate(self, note: Note) -> None:
        self._client.set_tag(self._run, f"{note.title}.{note.key}", f"step {note.step}: {note.text}"[:TAG_CHARS])

    def show(self, table: SampleTable) -> None:
        """Store the table as a CSV file among the run's artifacts. MLflow shows such a file as a table.

        MLflow keeps artifacts apart from rows. If only the artifacts cannot be stored, no more tables are sent.
        """
        if not self._has_artifacts:
            return
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["step", *table.columns])
        writer.writerows([table.step, *cells] for cells in table.rows)
        try:
            self._client.log_text(self._run, text.getvalue(), f"samples/row-{table.position:06}.csv")
        except Exception as error:
            self._client.get_run(self._run)  # raises if the server does not answer, so the table is sent later
            self._has_artifacts = False
            reason = f"none: artifacts cannot be stored: {type(error).__name__}: {shorten(str(error), LINE_CHARS)}"
            structlog.get_logger("tracker").warning("samples are no longer sent", tracker="mlflow", exc_info=error)
            self._client.set_tag(self._run, "samples", reason[:TAG_CHARS])

    def close(self, end: End) -> None:
        status = _STATUS.get(end.outcome, RunStatus.KILLED)
        self._client.set_terminated(self._run, RunStatus.to_string(status))

    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._section.experiment)
        if experiment is None:
            return str(self._client.create_experiment(self._section.experiment, self._artifacts()))
        if experiment.lifecycle_stage != "active":
            name = self._section.experiment
            raise TrackerRefused(
                f"experiment {name!r} has been deleted; restore it, or name another (monitor.mlflow.experiment)"
            )
        return str(experiment.experiment_id)

    def _artifacts(self) -> str | None:
        """Return the folder for artifacts beside the database, or None if a server decides where they are.

        MLflow's own default for a database is the folder in which this process runs.
        """
        database = self._database()
        return str(database.parent / "mlartifacts") if database is not None else None

    def _database(self) -> Path | None:
        """Return the file of a sqlite store, or None for a server."""
        database = self._section.uri.removeprefix("sqlite:///")
        return Path(database).absolute() if database != self._section.uri else None

    def _seen(self, experiment: str) -> str:
        """Return how to see the run. The client for trackers has no web server, so that is in an environment of its
        own."""
        database = self._database()
        if database is None:
            return f"{self._section.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
        uri = shlex.quote(f"sqlite:///{database}")
        return f".venv-mlflow/bin/mlflow ui --backend-store-uri {uri} (make setup-mlflow-ui installs it)"

    def _log(self, metrics: list[Metric]) -> None:
        remaining = iter(metrics)
        while batch := list(islice(remaining, BATCH_METRICS)):
            self._client.log_batch(self._run, metrics=batch)


def _metrics(row: CommittedRow) -> list[Metric]:
    at = int(time.time() * 1000)
    values = {_key(name): value for name, value in row.values.items()} | {"lineage": row.lineage, ROW: row.position}
    return [Metric(name, float(value), at, row.position) for name, value in values.items()]


def _key(name: str) -> str:
    """Return `name` in a form that MLflow accepts: `eval/math/pass@8` -> `eval/math/pass_at_8`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
