"""`ctl status`: a combined view of a run from its scheduler and its supervisor, either of which may be down.

Values that neither of them provides are null (None), never guesses.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import msgspec

from launch.processes.plan import SUPERVISOR
from launch.viewers.peer import Run, answer_or_none
from proto.messages import (
    ErrorCode,
    GetSnapshot,
    GetStatus,
    GetSupervisorState,
    ProcessRow,
    ServiceRow,
    Snapshot,
    Status,
    SupervisorState,
)
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.runfiles import warnings
from shared.runfiles.logs import tail
from shared.topology import TopologyError, load

SHOWN_WARNINGS = 5
"""Number of newest warnings that are listed."""
_GONE = frozenset(
    {ProcessState.WAITING, ProcessState.BACKOFF, ProcessState.STOPPED, ProcessState.FAILED, ProcessState.DRAINED}
)


def _no_answer_text(run: Run) -> str:
    if not isinstance(run, RunDir):
        return f"run {run.name}: neither scheduler nor supervisor answers; is it running?"
    last = _last_row(run).get("step")
    if last is not None and last == _steps(run) == 0:
        return f"run {run.path} is done; its evaluation is in {run.metrics}"
    if last is not None and last == _steps(run) and run.export.is_dir():
        return f"run {run.path} is done; its model is in {run.export}"
    so_far = f"it has reached step {last:g} of {_steps(run)}" if last is not None else "it has not completed a step"
    return (
        f"run {run.path}: neither scheduler nor supervisor answers, so it is not running; {so_far}; continue it with "
        f"`python -m launch.cluster {run.topology} --run-dir {run.path} --resume`"
    )


async def collect(run: Run) -> dict[str, Any]:
    """Return `{run, step, steps, version, services: [...], tasks, store, dropped, lost, last_drop, spares: [...],
    troubles: [...], warnings: [...]}`. The newest warnings come last.

    Raises RpcError if neither the scheduler nor the supervisor answers.
    """
    seen, supervised, warned = await asyncio.gather(
        answer_or_none(run, "scheduler", GetStatus(), Status),
        answer_or_none(run, SUPERVISOR, GetSupervisorState(), SupervisorState),
        _warnings(run),
    )
    if seen is None and supervised is None:
        raise RpcError(ErrorCode.DEADLINE, _no_answer_text(run))
    last = _last_row(run) if isinstance(run, RunDir) else {}
    return {
        "run": run.name,
        "step": seen.step if seen else last.get("step"),
        "steps": seen.steps if seen else _steps(run) if isinstance(run, RunDir) else None,
        "version": seen.version if seen else last.get("policy/version"),
        "services": _merge(seen.services if seen else [], supervised.processes if supervised else []),
        "tasks": dict(seen.tasks) if seen else {},
        "store": {
            "bytes": seen.store_bytes if seen else None,
            "limit_bytes": seen.store_limit_bytes if seen else None,
            "shards": seen.store_shards if seen else None,
        },
        "dropped": dict(seen.dropped) if seen else None,
        "lost": dict(seen.lost) if seen else None,
        "last_drop": seen.last_drop if seen else None,
        "spares": [msgspec.structs.asdict(record) for record in supervised.spares] if supervised else None,
        "troubles": [msgspec.structs.asdict(record) for record in seen.troubles] if seen else None,
        "warnings": [msgspec.structs.asdict(record) for record in warned],
    }


async def _warnings(run: Run) -> list[warnings.WarningRecord]:
    """Return the newest warnings in the run's file or, for a run on another machine, the newest of each kind."""
    if isinstance(run, RunDir):
        return warnings.read(run.warnings)[-SHOWN_WARNINGS:]
    seen = await answer_or_none(run, "monitor", GetSnapshot(), Snapshot)
    rows = [row for row in seen.rows if row.topic.startswith(warnings.TOPIC)] if seen else []
    records = [record for row in rows if (record := warnings.of_topic(row.values)) is not None]
    return sorted(records, key=lambda record: record.at)[-SHOWN_WARNINGS:]


def _merge(registered: list[ServiceRow], supervised: list[ProcessRow]) -> list[dict[str, Any]]:
    """Merge the supervisor's rows (processes, restarts) and the scheduler's rows (hosts, heartbeats), by service."""
    by_process = {(row.service, row.instance): row for row in registered}
    entries: list[dict[str, Any]] = []
    for process in supervised:
        row = by_process.pop((process.service, process.instance), None)
        same = row if row is not None and row.incarnation == process.incarnation else None
        host = same.host if same else socket.gethostname()
        age_s = same.heartbeat_age_s if same and process.state not in _GONE else None
        rss_bytes = process.rss_bytes or (same.rss_bytes if same else 0)
        entries.append(_entry(process, process.pid or None, host, process.restarts, age_s, rss_bytes))
    for row in by_process.values():  # These were started by hand or on another host, or the supervisor is down.
        entries.append(_entry(row, row.pid, row.host, None, row.heartbeat_age_s, row.rss_bytes))
    return entries


def _entry(
    row: ProcessRow | ServiceRow, pid: int | None, host: str, restarts: int | None, age_s: float | None, rss_bytes: int
) -> dict[str, Any]:
    return {
        "service": row.service,
        "instance": row.instance,
        "state": row.state,
        "pid": pid,
        "host": host,
        "incarnation": row.incarnation,
        "restarts": restarts,
        "heartbeat_age_s": age_s,
        "rss_bytes": rss_bytes,
    }


def _last_row(run: RunDir) -> dict[str, Any]:
    for line in reversed(tail(run.metrics, 2)):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}


def _steps(run: RunDir) -> int | None:
    try:
        return load(run.topology).run.last_step
    except TopologyError:
        return None


def table(answer: dict[str, Any]) -> None:
    """Print the status as tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{answer['run']}: step {answer['step']} of {answer['steps']}, policy version {answer['version']}")
    rows = Table(box=None, pad_edge=False)
    for column in ("service", "state", "pid", "restarts", "heartbeat", "memory", "host", "incarnation"):
        right = column in ("pid", "restarts", "heartbeat", "memory")
        rows.add_column(column, justify="right" if right else "left", no_wrap=column != "host")
    for entry in answer["services"]:
        age = entry["heartbeat_age_s"]
        rows.add_row(
            service_name(entry["service"], entry["instance"]),
            entry["state"],
            str(entry["pid"] or "-"),
            "-" if entry["restarts"] is None else str(entry["restarts"]),
            "-" if age is None else f"{age:.1f} s",
            f"{entry['rss_bytes'] / (1 << 20):.0f} MiB",
            entry["host"],
            f"{entry['incarnation']:016x}"[:8],
        )
    console.print(rows)
    if answer["tasks"]:
        console.print("tasks  " + "  ".join(f"{state} {count}" for state, count in answer["tasks"].items() if count))
    for name in ("dropped", "lost"):
        if answer[name]:
            console.print(
                f"{name}  " + "  ".join(f"{reason} {count}" for reason, count in sorted(answer[name].items()))
            )
    if answer["last_drop"]:
        console.print(f"the last drop  {answer['last_drop']}", markup=False)
    if answer["spares"]:
        for entry in answer["spares"]:
            size = f"{entry['rss_bytes'] / (1 << 20):.0f} MiB{'' if entry['warm'] else ' (importing)'}"
            console.print(f"spare for {', '.join(entry['services'])}  {size}")
    for trouble in answer["troubles"] or ():
        console.print(f"{service_name(trouble['service'], trouble['instance'])}  {trouble['text']}", markup=False)
    for warning in answer["warnings"]:
        console.print(warnings.line_of(warnings.WarningRecord(**warning)), markup=False)
    store = answer["store"]
    if store["bytes"] is not None:
        console.print(
            f"store  {store['bytes'] / (1 << 20):.1f} of {store['limit_bytes'] / (1 << 20):.0f} MiB, "
            f"{store['shards']} shards"
        )
