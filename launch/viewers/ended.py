"""Says in one line, and in the same words for every command, how a run on this machine ended."""

from __future__ import annotations

import json
import time
from typing import Any

from launch.processes.plan import SUPERVISOR
from shared.rundir import RunDir
from shared.runfiles.logs import tail
from shared.runfiles.outcome import LAUNCHER_LOCK, is_held, read_outcome
from shared.topology import TopologyError, load_resolved


def resume_command(run: RunDir) -> str:
    """Return the command that continues the run."""
    return f"python -m launch.cluster {run.topology} --run-dir {run.path} --resume"


def is_over(run: RunDir) -> bool:
    """Return whether the run has ended or its launcher was killed. A run that had no launcher, because its services
    were started by hand, is not over."""
    launched = (run.path / LAUNCHER_LOCK).exists() or read_outcome(run.path) is not None
    return launched and not (is_held(run.path) and run.sockets.exists())


def ended_text(run: RunDir) -> str:
    """Return one line that says how the run ended, when, at which step and why, and how it can be continued.

    The line is empty while the launcher of the run is alive, or if the run has none.
    """
    end = read_outcome(run.path)
    if not is_over(run) or (end is None and is_held(run.path)):
        return ""
    at = _progress(run)
    if end is None:
        log = run.log_file(SUPERVISOR, 0)
        if not log.exists():
            how = "has not started: its launcher ended before it started a process"
        else:
            how = f"was killed{at}: its supervisor recorded no end, and its last sign of life was at {_last_sign(run)}"
    elif end.outcome == "done":
        where = f"model is in {run.export}" if run.export.is_dir() else f"evaluation is in {run.metrics}"
        return f"run {run.path} was done at {_clock(end.at)}{at}; its {where}"
    else:
        how = f"{'failed' if end.outcome == 'failed' else 'was stopped'} at {_clock(end.at)}{at}: {end.cause}"
    return f"run {run.path} {how}; continue it with `{resume_command(run)}`"


def _progress(run: RunDir) -> str:
    steps = last_step(run)
    step = last_row(run).get("step")
    if not steps:
        return ""
    return f" at step {step:g} of {steps}" if step is not None else " before its first step"


def _last_sign(run: RunDir) -> str:
    files = [run.metrics, run.journal, *run.logs.glob("*.jsonl")]
    return _clock(max(file.stat().st_mtime for file in files if file.exists()))


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def last_row(run: RunDir) -> dict[str, Any]:
    """Return the newest row of metrics.jsonl, or {} if it has no rows."""
    for line in reversed(tail(run.metrics, 2)):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}


def last_step(run: RunDir) -> int | None:
    """Return the number of steps of the run, 0 for an evaluation, or None if its topology cannot be read."""
    try:
        return load_resolved(run.topology).last_step
    except TopologyError:
        return None
