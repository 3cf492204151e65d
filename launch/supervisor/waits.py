"""Describes, for human readers, what the processes of a run are waiting for, as seen by the supervisor. It makes no
decisions."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from launch.supervisor.plan import Key
from launch.supervisor.state import Process, RunLifecycle, RunPhase
from proto.messages import WaitKind, WaitRow
from shared.actor.service import ProcessState
from shared.rundir import service_name


class ProcessWaits:
    """Remembers when each process entered its current state."""

    def __init__(self) -> None:
        self._since: dict[Key, tuple[ProcessState, bool, float]] = {}
        self._phase: tuple[RunPhase | None, float] = (None, 0.0)

    def note(self, state: RunLifecycle, now: float) -> None:
        """Record the states after an event."""
        if state.phase != self._phase[0]:
            self._phase = (state.phase, now)
        for key, process in state.processes.items():
            known = self._since.get(key)
            if known is None or known[:2] != (process.state, process.told_to_end):
                self._since[key] = (process.state, process.told_to_end, now)

    def phase_s(self, now: float) -> float:
        """Return how long the run has been in its current phase, in seconds."""
        return now - self._phase[1]

    def rows(self, state: RunLifecycle, now: float) -> list[WaitRow]:
        """Return a row for each process that is starting, stopping, or waiting for its restart."""
        rows: list[WaitRow] = []
        for key, process in state.processes.items():
            since = self._since[key][2] if key in self._since else now
            found = _what(process, held=key[0] in state.held)
            if found is not None:
                what, until = found
                limit_s = until - since if until is not None else 0.0
                rows.append(WaitRow(WaitKind.PROCESS, what, now - since, max(limit_s, 0.0), service_name(*key)))
        return rows


def _what(process: Process, *, held: bool) -> tuple[str, float | None] | None:
    """Return a description of what a process is doing, and its deadline if it has one.

    Return None if the process is simply running or has ended.
    """
    name = service_name(*process.key)
    if process.told_to_end and process.pid:
        return f"{name} is stopping, as requested", process.kill_at
    match process.state:
        case ProcessState.STARTING:
            return f"{name} is starting" + (f" again after {process.cause}" if process.cause else ""), process.ready_by
        case ProcessState.BACKOFF:
            return f"{name} died ({process.cause}) and will start again, restart {process.restarts}", process.start_at
        case ProcessState.WAITING if held:
            return f"{name} will be started once its libraries have been imported (run.spares)", None
        case ProcessState.WAITING:
            return f"{name} will be started once the scheduler, stores and monitor are READY", None
        case _:
            return None


def stopped_processes(pids: Mapping[Key, int]) -> list[WaitRow]:
    """Return a row for each process of the run that a signal has stopped, including processes started by services."""
    owners = {pid: key for key, pid in pids.items()}
    processes = {each.pid: each for each in psutil.process_iter(["ppid", "status"])}
    rows: list[WaitRow] = []
    for pid, process in processes.items():
        if process.info["status"] != psutil.STATUS_STOPPED:
            continue
        owner, steps = pid, 0
        while owner not in owners and owner in processes and steps < len(processes):
            owner, steps = processes[owner].info["ppid"], steps + 1
        if owner in owners:
            name = service_name(*owners[owner])
            whose = name if owner == pid else f"a process that {name} started"
            text = f"{whose} (process {pid}) is stopped by a signal; kill -CONT {pid} lets it continue"
            rows.append(WaitRow(WaitKind.STOPPED, text, 0.0, 0.0, name))
    return rows
