"""What the tracker asks of the client of an experiment tracker: open, send, annotate, close."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from services.tracker.history import Row
from services.tracker.samples import Table
from shared.topology.monitor_trackers import Tracker

LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "wandb": ("wandb",),
        "tensorboard": ("tensorboard",),
        "mlflow": ("mlflow", "sqlalchemy", "alembic"),
        "trackio": ("trackio",),
    }
)
"""The modules that each tracker needs, all of which `make setup-trackers` installs."""


class Unusable(Exception):
    """The tracker refuses this run whatever is tried: a wrong key, project or entity. One line."""


@dataclass(frozen=True)
class Note:
    """Text about the run: a warning, a return to an earlier step, its end. Two notes with one `key` are the same."""

    key: str
    title: str
    text: str
    step: int
    """The training step to which it belongs."""
    position: int
    """The position of the newest row that precedes it, or 0 if there is none."""
    serious: bool = True
    """Whether a person should look."""


@dataclass(frozen=True)
class End:
    """How the run ended."""

    outcome: str
    """`done`, `stopped`, `failed`, or `killed` if nobody could say."""
    cause: str = ""


@dataclass(frozen=True)
class Subject:
    """The run as the tracker is to know it."""

    id: str
    """Names the run in the tracker. It is chosen once, before the tracker hears of it."""
    name: str
    path: Path
    folder: Path
    """A folder of the run directory for the tracker's own files."""
    configuration: Mapping[str, Any]
    """The resolved topology without secrets."""
    sent: int
    """The rows that were handed over before."""
    predecessor: int
    """Process id of the previous life, or 0."""


class Exporter(Protocol):
    """The client of one tracker. It may block and raise anything; nobody waits for it.

    It holds a row for certain once `send` returns if `SURE`, and once `close` returns otherwise.
    """

    SURE: bool
    samples: int
    """Number of samples per split in a table, or 0 for no tables."""

    def open(self, subject: Subject) -> int:
        """Create the run in the tracker, or continue it. Return the number of rows that the tracker holds.

        Raises Unusable.
        """

    def send(self, rows: Sequence[Row]) -> None:
        """Report rows, in order and without gaps after those that the tracker holds."""

    def annotate(self, note: Note) -> None:
        """Report a note. A repeated note has no further effect where the tracker can tell."""

    def show(self, table: Table) -> None:
        """Report samples. They may be lost if this process is killed; the run directory has them all."""

    def close(self, end: End) -> None:
        """Finish, so that the tracker shows how the run ended."""


def missing(name: str) -> list[str]:
    """Return the modules of tracker `name` that are not installed."""
    return [module for module in LIBRARIES[name] if importlib.util.find_spec(module) is None]


def make(name: str, section: Tracker) -> Exporter:
    """Return the exporter of tracker `name`. Its library is imported here, which takes seconds."""
    make_exporter: Callable[[Tracker], Exporter] = importlib.import_module(f"services.tracker.exporters.to_{name}").make
    return make_exporter(section)
