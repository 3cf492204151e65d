"""`ctl status`: a combined view of a run from its scheduler and its supervisor, either of which may be down.

Values that neither of them provides are null (None), never guesses.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from launch.processes.plan import SUPERVISOR
from launch.viewers.ended import last_row, last_step
from launch.viewers.peer import Run, answer_or_none, no_answer_text
from proto.messages import (
    ErrorCode,
    GetSnapshot,
    GetStatus,
    GetSupervisorState,
    HostRow,
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

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_WARNINGS = 5
"""Number of newest warnings that are listed."""
_GONE = frozenset(
    {ProcessState.WAITING, ProcessState.BACKOFF, ProcessState.STOPPED, ProcessState.FAILED, ProcessState.DRAINED}
)


async def collect(run: Run) -> dict[str, Any]:
    """Return `{run, step, steps, version, services: [...], hosts: [...], tasks, store, dropped, lost, last_drop,
    spares: [...], troubles: [...], warnings: [...]}`. The newest warnings come last.

    Raises RpcError if neither the scheduler nor the supervisor answers.
    """
    seen, supervised, warned = await asyncio.gather(
        answer_or_none(run, "scheduler", GetStatus(), Status),
        answer_or_none(run, SUPERVISOR, GetSupervisorState(), SupervisorState),
        _warnings(run),
    )
    if seen is None and supervised is None:
        raise RpcError(ErrorCode.DEADLINE, no_answer_text(run))
    last = last_row(run) if isinstance(run, RunDir) else {}
    return {
        "run": run.name,
        "step": seen.step if seen else last.get("step"),
        "steps": seen.steps if seen else last_step(run) if isinstance(run, RunDir) else None,
        "version": seen.version if seen else last.get("policy/version"),
        "services": _merge(
            seen.services if seen else [],
            supervised.processes if supervised else [],
            supervised.hosts if supervised else [],
        ),
        "hosts": [msgspec.structs.asdict(row) for row in supervised.hosts] if supervised else None,
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


def _merge(registered: list[ServiceRow], supervised: list[ProcessRow], hosts: list[HostRow]) -> list[dict[str, Any]]:
    """Merge the supervisor's rows (processes, restarts) and the scheduler's rows (hosts, heartbeats), by service."""
    places = {name: row.host for row in hosts for name in row.processes}
    by_process = {(row.service, row.instance): row for row in registered}
    entries: list[dict[str, Any]] = []
    for process in supervised:
        row = by_process.pop((process.service, process.instance), None)
        same = row if row is not None and row.incarnation == process.incarnation else None
        name = service_name(process.service, process.instance)
        host = same.host if same else places.get(name, socket.gethostname())
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


def _hosts_table(hosts: list[dict[str, Any]]) -> Table:
    """Return a table of the hosts, each with its state, its silence and its processes."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False)
    for column in ("host", "state", "for", "silent", "processes"):
        rows.add_column(column, justify="right" if column in ("for", "silent") else "left")
    for row in hosts:
        silent = "-" if row["silent_s"] < 0 else f"{row['silent_s']:.1f} s"
        cause = f" (last: {row['cause']})" if row["cause"] else ""
        what = Text(f"{', '.join(row['processes']) or 'none'}{cause}")
        rows.add_row(row["host"], row["state"], f"{row['state_s']:.0f} s", silent, what)
    return rows


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
    if answer["hosts"]:
        console.print(_hosts_table(answer["hosts"]))
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
