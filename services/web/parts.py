"""The parts of the page that both the live page and the saved page show, as the scripts in `static/` expect them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.runfiles.files import RunFiles
from shared.runfiles.outcome import read_outcome
from shared.view.curves import PANELS, Panel


def head(
    files: RunFiles,
    runs: Sequence[str],
    *,
    live: bool = False,
    operable: bool = False,
    panels: Sequence[Panel] = PANELS,
) -> dict[str, Any]:
    """Return the head: the progress of the run, its metrics, and the other runs that can be compared with it."""
    names = files.names()
    return {
        "run": files.path.name,
        "runs": runs,
        "live": live,
        "operable": operable,
        "progress": files.view.progress(),
        "names": names,
        "panels": [{"title": panel.title, "names": panel.matching(names)} for panel in panels],
        "last": [files.epoch, files.last_step],
        "ended": "" if live else ended(files.path),
    }


def notices(files: RunFiles, *, live: bool = False) -> dict[str, Any]:
    """Return the warnings, the current troubles, and the returns to earlier steps."""
    view = files.view
    return {
        "warnings": view.warnings(),
        "left_out": view.warnings_left_out,
        "troubles": view.troubles() if live else [],
        "rewinds": view.rewinds(),
    }


def ended(run: Path) -> str:
    """Return how the run ended and why, or an empty string if this is not known."""
    recorded = read_outcome(run)
    return f"{recorded.outcome}: {recorded.cause}".removesuffix(": ") if recorded is not None else ""
