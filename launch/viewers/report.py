"""Writes the page of a run as one file: `report.html`, at the end of every run, and the pages of `ctl report` and
`ctl plot`.

The time that a finishing run waits for its report is limited.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from launch.processes.plan import SUPERVISOR
from proto.messages import ErrorCode
from services.web.saved import page
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.runfiles.files import RunFiles
from shared.runfiles.metrics import METRICS
from shared.view.curves import PANELS, Panel

REPORT = "report.html"
AT_END_S = 1.0
"""Maximum seconds that a finishing run waits for the report."""


def write_report(run: RunDir) -> Path:
    """Write the page and return its path. Raises OSError."""
    path = run.path / REPORT
    partial = path.with_name(f".{REPORT}.{os.getpid()}.partial")
    try:
        partial.write_text(page([run.path]), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_in_time(run: RunDir, limit_s: float = AT_END_S) -> str:
    """Write the page within `limit_s`. Return a line for the console about the result. A failure is also logged."""
    told = [f"not ready after {limit_s:g} s; python -m launch.ctl --run {run.path} report writes it"]

    def work() -> None:
        try:
            told[0] = str(write_report(run))
        except Exception as error:  # a damaged file may cause any error, but must not change the run's outcome
            structlog.get_logger(SUPERVISOR).warning("no report", exc_info=error)
            told[0] = f"not written ({type(error).__name__}: {error}), log: {run.log_file(SUPERVISOR, 0)}"

    # The process does not wait for a daemon thread at exit. The thread writes to its own file and renames it last.
    thread = threading.Thread(target=work, name="report", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[0]


def plot(folders: Sequence[Path], wanted: Sequence[str], out: Path) -> list[str]:
    """Write a page with the curves of runs to `out`. Return the metrics of the charts.

    Without `wanted` (names, or patterns such as `eval/*/reward`), the charts are those of the page. Raises OSError,
    and RpcError(bad_request) if a folder has no metrics or no run has a wanted metric.
    """
    names: dict[str, None] = {}
    for folder in folders:
        if not (folder / METRICS).is_file():
            text = f"run {folder}: has no {METRICS}; name the directory of a run that has begun"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        files = RunFiles(folder)
        while files.read():
            pass
        names |= dict.fromkeys(files.names())
    metrics = chosen(list(names), wanted)
    panels = [Panel(name, (name,)) for name in metrics] if wanted else PANELS
    out.write_text(page(folders, panels), encoding="utf-8")
    return metrics


def chosen(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the names in `known` that match `wanted`, or those of the page's charts if nothing is wanted.

    Raises RpcError(bad_request) with the nearest name if no name matches.
    """
    if not wanted:
        return [name for panel in PANELS for name in panel.matching(names)]
    metrics: dict[str, None] = {}
    for pattern in wanted:
        matching = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "docs/metrics.md lists them"
            raise RpcError(ErrorCode.BAD_REQUEST, f"metric {pattern!r}: no row in these runs has it; {hint}")
        metrics |= dict.fromkeys(matching)
    return list(metrics)
