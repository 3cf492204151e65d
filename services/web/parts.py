"""The parts of the page that both the live page and the saved page show, as the scripts in `static/` expect them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.runfiles.files import RunFiles
from shared.runfiles.outcome import read_outcome
from shared.view.curves import PANELS, Panel
from shared.view.timeline import thinned

MAX_PIECES = 1000
"""Number of pieces of a time line, about one per pixel. Spans of the same kind with a smaller gap are sent as one."""


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
        "ended_at": None if live else files.view.newest_at or None,
        "ended": "" if live else ended(files.path),
    }


def timeline(files: RunFiles, now: float, seconds: float, *, share: float = 1.0) -> dict[str, Any]:
    """Return the spans in the `seconds` before `now`, thinned to `share` of the usual number of pieces."""
    view, gap_s = files.view, seconds / (MAX_PIECES * share)
    return {
        "now": now,
        "seconds": seconds,
        "lanes": [
            {
                "name": lane.name,
                "known_s": lane.known_s,
                "working_s": lane.working_s,
                "waiting_s": lane.waiting_s,
                "waits": [[wait.what[:80], wait.of[:80], wait.seconds] for wait in lane.waits],
                "spans": [
                    [round(span.begin - now, 3), round(span.end - now, 3), span.what[:80], span.of[:80], count]
                    for span, count in thinned(lane.spans, gap_s)
                ],
            }
            for lane in view.timeline(now, seconds)
        ],
        "steps": [[round(end.at - now, 3), end.step] for end in view.step_ends(now, seconds)],
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
