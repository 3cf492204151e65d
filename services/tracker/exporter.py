"""The interface that each experiment tracker's client implements: open, send, annotate, show, close."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from services.tracker.samples import SampleTable
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Tracker


@dataclass(frozen=True)
class TrackerKind:
    """A tracker's exporter, and the modules that it needs, all of which `make setup-trackers` installs."""

    exporter: str
    """Import path `module:class`."""
    modules: tuple[str, ...]


TRACKERS: Mapping[str, TrackerKind] = MappingProxyType(
    {
        "wandb": TrackerKind("services.tracker.exporters.to_wandb:WandbExporter", ("wandb",)),
        "tensorboard": TrackerKind("services.tracker.exporters.to_tensorboard:TensorboardExporter", ("tensorboard",)),
        "mlflow": TrackerKind(
            "services.tracker.exporters.to_mlflow:MlflowExporter", ("mlflow", "sqlalchemy", "alembic")
        ),
        "trackio": TrackerKind("services.tracker.exporters.to_trackio:TrackioExporter", ("trackio",)),
    }
)
"""The supported trackers, by their keys in the section `monitor`."""
REMEDY = "run `make setup-trackers`"
"""What to do if a module is missing."""
LINE_CHARS = 300
"""Maximum number of characters of an error in a message."""


class TrackerRefused(Exception):
    """The tracker refuses this run (for example, because of a wrong key, project or entity), and retrying cannot help.

    The text is one line.
    """


@dataclass(frozen=True)
class Note:
    """Text about the run: a warning, a return to an earlier step, or its end. The `key` identifies the note."""

    key: str
    title: str
    text: str
    step: int
    """The training step to which the note belongs."""
    position: int
    """The position of the newest row that precedes the note, or 0 if there is none."""
    serious: bool = True
    """Whether the note needs a person's attention."""


@dataclass(frozen=True)
class End:
    """How the run ended."""

    outcome: str
    """`done`, `stopped`, `failed`, or `killed` if no outcome was recorded."""
    cause: str = ""


@dataclass(frozen=True)
class Subject:
    """The run as it is presented to the tracker."""

    id: str
    """Identifies the run in the tracker. The id is chosen once, before it is first sent to the tracker."""
    name: str
    path: Path
    folder: Path
    """A folder in the run directory for the tracker's own files."""
    configuration: Mapping[str, Any]
    """The resolved topology without secrets."""
    sent: int
    """Number of rows that the tracker is known to hold."""


class Exporter(Protocol):
    """The client of one tracker. Its methods may block and raise any exception; nothing waits for them. After an
    exception, a new exporter is opened.

    If `SURE` is true, the tracker is certain to hold what it was given once a method returns; otherwise, once `close`
    returns, and until then it is given everything again after an exception or a kill.
    """

    SURE: bool
    see: str
    """The command that shows the run, or the address at which it is seen. It is set by `open`."""

    def open(self, subject: Subject) -> int:
        """Create the run in the tracker, or continue it. Return the number of rows that it has, or `subject.sent` if
        the tracker does not say.

        Raises TrackerRefused.
        """

    def send(self, rows: Sequence[CommittedRow]) -> None:
        """Report rows in order. The tracker may already hold some of them."""

    def annotate(self, note: Note) -> None:
        """Report a note. Repeating a note has no effect in trackers that can recognize it."""

    def show(self, table: SampleTable) -> None:
        """Report samples. Some may be lost if this process is killed; the run directory contains all samples."""

    def close(self, end: End) -> None:
        """Finish the run in the tracker, so that it shows how the run ended."""


def missing(name: str) -> list[str]:
    """Return the modules required by tracker `name` that are not installed."""
    return [module for module in TRACKERS[name].modules if importlib.util.find_spec(module) is None]


def make(name: str, section: Tracker) -> Exporter:
    """Return the exporter for tracker `name`. This imports the tracker's library, which takes seconds.

    Raises TrackerRefused if a module is not installed.
    """
    try:
        exporter: Exporter = pkgutil.resolve_name(TRACKERS[name].exporter)(section)
    except ModuleNotFoundError as error:
        raise TrackerRefused(f"{error.name} not installed in this environment; {REMEDY}") from error
    return exporter
