"""The interface that each experiment tracker's client implements: open, send, annotate, show, close."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from services.tracker.samples import SampleTable
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Tracker

LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "wandb": ("wandb",),
        "tensorboard": ("tensorboard",),
        "mlflow": ("mlflow", "sqlalchemy", "alembic"),
        "trackio": ("trackio",),
    }
)
"""The modules that each tracker needs, all of which `make setup-trackers` installs."""
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
    return [module for module in LIBRARIES[name] if importlib.util.find_spec(module) is None]


def make(name: str, section: Tracker) -> Exporter:
    """Return the exporter for tracker `name`. This imports the tracker's library, which takes seconds."""
    module = importlib.import_module(f"services.tracker.exporters.to_{name}")
    exporter: Exporter = getattr(module, f"{name.capitalize()}Exporter")(section)
    return exporter
