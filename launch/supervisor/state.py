"""Decides when the processes of a run start, restart and end: `handle(event, now) -> effects`.

It uses no process, socket or clock. Three transitions are missing on purpose. A run that has failed or is draining
starts no processes. A process that ended because the run is ending is not restarted. A process that met an input that
cannot be used (a bad model, a bad setting, changed data) is not restarted, because the next process
would fail in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from launch.processes.plan import (
    DRAIN_ORDER,
    DRIVER,
    FIRST,
    LAST,
    OPTIONAL,
    OUTSIDE_KILLS,
    Key,
    describe_exit,
    drain_group,
)
from launch.supervisor import events as e
from launch.supervisor.events import RunOutcome
from shared.actor.service import PEER_LOST_STATUS, UNUSABLE_STATUS, ProcessState
from shared.rundir import service_name
from shared.topology.models import WORKERS

FAILURE_LIMIT = 4
"""If a process dies this many times within `WINDOW_S` through its own fault (an error, a crash), the run fails."""
KILL_LIMIT = 40
"""If a process dies this many times within `WINDOW_S` through an outside kill or a lost peer, the run fails."""
WINDOW_S = 300.0
FIRST_BACKOFF_S = 0.25
FAILURE_BACKOFF_S = 8.0
KILL_BACKOFF_S = 1.0
"""Maximum delay, in seconds, before the restart of a process that was killed again before it was READY."""
DRAIN_LIMIT_S = 15.0
"""Seconds after which a process that was told to stop is killed. Services limit their own drain to 10 s."""
RETIRE_LIMIT_S = 600.0
"""Seconds after which a process that was asked to finish its leases is told to stop, so that it returns them."""
SAVES = frozenset({DRIVER, *WORKERS.values()})
"""At the end of a run, these services have time to save a checkpoint, in addition to `DRAIN_LIMIT_S`."""


class RunPhase(StrEnum):
    """The phases of a run, in order."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    ENDED = "ENDED"


@dataclass
class Process:
    """The supervisor's record of one process."""

    key: Key
    state: ProcessState = ProcessState.WAITING
    pid: int = 0
    incarnation: int = 0
    restarts: int = 0
    cause: str = ""
    told_to_end: bool = False
    served: bool = False
    """Whether the process has been READY since it was last started."""
    kill_at: float | None = None
    start_at: float | None = None
    ready_by: float | None = None
    given_up: bool = False
    """Whether the run goes on without this process because it failed too often. Only the operator starts it again."""
    drain_by: float | None = None
    """Time at which a process that is being drained is told to stop, whatever it is doing; None for other processes."""
    failures: deque[float] = field(default_factory=deque)
    kills: deque[float] = field(default_factory=deque)

    @property
    def alive(self) -> bool:
        return self.pid != 0 or self.state == ProcessState.STARTING


class RunLifecycle:
    """The state machine of one run. `processes` keeps the order of the plan."""

    def __init__(
        self,
        plan: Sequence[Key],
        save_limit_s: float = 0.0,
        *,
        start_limit_s: float,
        hosts: bool = False,
        held: Collection[str] = (),
    ) -> None:
        """`save_limit_s` is the maximum time, in seconds, that the trainer may take to save a checkpoint at the end of
        the run. A process that is not READY within `start_limit_s` seconds of its start is killed and counts as failed.
        `hosts` means that the run has processes on other hosts, which are stopped before the services that they talk
        to. The services in `held` are not started before their spare is settled."""
        self._hosts = hosts
        self.held = set(held)
        """The services that wait for their spare before their first start."""
        self._save_limit_s = save_limit_s
        self._start_limit_s = start_limit_s
        self.phase = RunPhase.STARTING
        self.processes = {key: Process(key) for key in plan}
        self._outcome = RunOutcome.DONE
        self._cause = ""
        self._culprit: Key | None = None
        self._explained = False
        self._rolling: deque[Sequence[Key]] = deque()
        """The groups of a rolling restart that are still to be restarted, starting with the current one."""
        self._rolled: dict[Key, int] = {}
        """The restart counts of the current group's processes before their restart, empty until the restart begins."""
        self._effects: list[e.Effect] = []

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        """Handle one event at loop time `now`. Return the effects to carry out, in order."""
        self._effects = []
        if self.phase == RunPhase.ENDED:
            return []
        match event:
            case e.TimePassed():
                pass
            case e.SpareSettled(services):
                self.held.difference_update(services)
            case e.Spawned(key, pid):
                self._spawned(self.processes[key], pid, now)
            case e.Reported():
                self._reported(event, now)
            case e.Exited():
                self._exited(event, now)
            case e.RestartAsked(keys):
                for key in keys:
                    self._restart(self.processes[key], now)
            case e.RollingRestartAsked(groups):
                self._rolling.extend(groups)
            case e.DrainAsked(keys):
                for key in keys:
                    self._retire(self.processes[key], now)
            case e.StartAsked(keys):
                for key in keys:
                    self._begin(self.processes.setdefault(key, Process(key)), now)
            case e.KillOrdered(key, pid, cause):
                self._kill(self.processes[key], pid, cause)
            case e.EndAsked(cause, outcome, at_once):
                self._drain(outcome, cause, None)
                if at_once:
                    self._hosts = False  # the keepers of the other hosts kill their processes
                    for process in self.processes.values():
                        process.kill_at = now if process.alive else process.kill_at
            case e.HostsEnded():
                self._hosts = False
            case _:
                assert_never(event)
        self._advance(now)
        return self._effects

    def pids(self) -> Iterator[tuple[Key, int]]:
        """Yield the running processes, with their process ids."""
        for key, process in self.processes.items():
            if process.pid:
                yield key, process.pid

    def next_deadline(self) -> float | None:
        """Return the time at which a `TimePassed` is due, if any."""
        times = [
            at
            for process in self.processes.values()
            for at in (process.kill_at, process.start_at, process.ready_by, process.drain_by)
        ]
        return min((at for at in times if at is not None), default=None)

    @property
    def end(self) -> tuple[RunOutcome, str]:
        """The outcome of the run and its cause. They are valid once the run is DRAINING."""
        return self._outcome, self._cause

    @property
    def ending(self) -> bool:
        """Whether the run is ending or has ended."""
        return self.phase in (RunPhase.DRAINING, RunPhase.ENDED)

    @property
    def calm(self) -> bool:
        """Whether the run goes on and no process is starting or ending."""
        ready = all(process.state == ProcessState.READY for process in self._active())
        return ready and self.phase == RunPhase.RUNNING

    # ---- events

    def _spawned(self, process: Process, pid: int, now: float) -> None:
        process.pid = pid
        if process.told_to_end:  # it was told to stop while it was being started
            self._effects.append(e.Terminate(process.key, pid))
            process.kill_at = self._kill_at(process, now)

    def _reported(self, event: e.Reported, now: float) -> None:
        process = self.processes.get(event.key)
        if process is None or process.pid != event.pid or not process.alive:
            return  # from an earlier process of this instance, or from one that was started by hand
        process.incarnation = event.incarnation
        process.state = event.state
        if event.state == ProcessState.READY:
            process.served = True
        if event.cause:
            process.cause = event.cause
        if event.state != ProcessState.STARTING:
            process.ready_by = None
        if event.state not in (ProcessState.STARTING, ProcessState.READY) and process.kill_at is None:
            process.kill_at = self._kill_at(process, now)

    def _kill(self, process: Process, pid: int, cause: str) -> None:
        if process.pid == pid and process.alive:
            process.state = ProcessState.FAILED
            process.cause = cause
            self._effects.append(e.Kill(process.key, pid, hung=True))

    def _exited(self, event: e.Exited, now: float) -> None:
        process = self.processes[event.key]
        if event.pid != process.pid:
            return
        asked = process.told_to_end
        reported = process.cause if process.state == ProcessState.FAILED else ""
        cause = reported or describe_exit(event.status)
        retired = process.drain_by is not None
        process.pid = 0
        process.kill_at = process.ready_by = process.drain_by = None
        process.told_to_end = False
        if self.phase == RunPhase.DRAINING:
            process.state = ProcessState.STOPPED if event.status == 0 else ProcessState.FAILED
            process.cause = "" if event.status == 0 or asked else cause
            return
        if retired:
            process.state = ProcessState.DRAINED
            process.cause = "drained by the operator"
        elif asked:
            process.restarts += 1
            process.cause = "restarted by the operator"
            self._spawn(process, now)
        elif event.key[0] == DRIVER and event.status == 0 and event.run_complete:
            process.state = ProcessState.STOPPED
            self._drain(RunOutcome.DONE, "", None)
        elif event.status == UNUSABLE_STATUS:
            self._fail(process, f"{cause} (another start would fail, too)", explained=bool(reported))
        else:
            killed = not reported and event.status in OUTSIDE_KILLS
            outside = killed or event.status == PEER_LOST_STATUS
            self._died(process, cause, process.kills if outside else process.failures, now)

    def _died(self, process: Process, cause: str, deaths: deque[float], now: float) -> None:
        process.cause = cause
        killed = deaths is process.kills
        limit = KILL_LIMIT if killed else FAILURE_LIMIT
        deaths.append(now)
        while deaths[0] < now - WINDOW_S:
            deaths.popleft()
        if len(deaths) >= limit:
            self._fail(process, f"{cause} (death {len(deaths)} in {WINDOW_S:g} s, limit {limit})")
            return
        longest = KILL_BACKOFF_S if killed else FAILURE_BACKOFF_S
        at_once = killed and (process.served or len(deaths) == 1)  # a process that was READY is not in a restart loop
        delay_s = 0.0 if at_once else min(FIRST_BACKOFF_S * 2 ** (len(deaths) - 1), longest)
        process.restarts += 1
        process.state = ProcessState.BACKOFF
        process.start_at = now + delay_s
        self._effects.append(e.Died(process.key, cause, process.restarts, delay_s))

    def _fail(self, process: Process, cause: str, *, explained: bool = False) -> None:
        """End the run because of `process`, or go on without it if it is optional."""
        process.cause = cause
        process.state = ProcessState.FAILED
        if process.key[0] in OPTIONAL:
            process.given_up = True
            self._effects.append(e.GivenUp(process.key, cause))
            return
        self._drain(RunOutcome.FAILED, f"{service_name(*process.key)}: {cause}", process.key, explained=explained)

    def _restart(self, process: Process, now: float) -> None:
        if self.phase == RunPhase.DRAINING:
            return
        if process.state == ProcessState.BACKOFF:
            process.start_at = now
        elif process.state == ProcessState.DRAINED or process.given_up:
            self._begin(process, now)
        elif process.alive:
            self._tell_to_end(process, now)

    def _retire(self, process: Process, now: float) -> None:
        if self.phase == RunPhase.DRAINING or process.state == ProcessState.DRAINED or process.drain_by is not None:
            return
        process.start_at = None
        if not process.alive:
            process.state = ProcessState.DRAINED
            return
        process.drain_by = now + RETIRE_LIMIT_S
        if process.state == ProcessState.READY:
            self._effects.append(e.RetireProcess(process.key, process.pid))
        else:
            self._tell_to_end(process, now)

    def _begin(self, process: Process, now: float) -> None:
        """Run a process that is new, DRAINED, being drained, or given up."""
        if self.phase == RunPhase.DRAINING:
            return
        if process.state == ProcessState.DRAINED or process.given_up:
            process.state = ProcessState.WAITING
            process.given_up = False
            process.failures.clear()
            process.kills.clear()
        elif process.drain_by is not None:
            process.drain_by = None
            self._tell_to_end(process, now)  # it takes no further leases until its next start

    def _roll(self, now: float) -> None:
        """Continue a rolling restart: tell the next group to stop once the previous one is READY again."""
        while self._rolling:
            group = [self.processes[key] for key in self._rolling[0] if key in self.processes]
            group = [process for process in group if _is_active(process)]
            if not self._rolled:
                if any(process.state != ProcessState.READY for process in self._active()):
                    return
                self._rolled = {process.key: process.restarts for process in group}
                for process in group:
                    self._tell_to_end(process, now)
            if any(
                process.state != ProcessState.READY or process.restarts == self._rolled[process.key]
                for process in group
            ):
                return
            self._rolling.popleft()
            self._rolled = {}

    def _active(self) -> list[Process]:
        """Return the processes that should be running."""
        return [process for process in self.processes.values() if _is_active(process)]

    # ---- progress

    def _advance(self, now: float) -> None:
        self._enforce_deadlines(now)
        if self.phase == RunPhase.DRAINING:
            self._advance_drain(now)
            return
        first = [process for process in self.processes.values() if process.key[0] in FIRST]
        up = all(process.state == ProcessState.READY for process in first)
        for process in self.processes.values():
            due = process.state == ProcessState.BACKOFF and process.start_at is not None and process.start_at <= now
            begun = process.state == ProcessState.WAITING and (up or process in first)
            begun = begun and process.key[0] not in self.held
            if due or begun:
                self._spawn(process, now)
        if all(process.state == ProcessState.READY for process in self._active()):
            self.phase = RunPhase.RUNNING
        self._roll(now)

    def _enforce_deadlines(self, now: float) -> None:
        for process in self.processes.values():
            if process.ready_by is not None and process.ready_by <= now and process.pid:
                process.ready_by = None
                cause = f"not READY within {self._start_limit_s:g} s of its start (run.start_limit_s)"
                self._kill(process, process.pid, cause)
            if process.drain_by is not None and process.drain_by <= now and process.pid:
                process.drain_by = now + RETIRE_LIMIT_S  # stays set, because the process must not start again
                self._tell_to_end(process, now)
            if process.kill_at is not None and process.kill_at <= now and process.pid:
                process.kill_at = None
                self._effects.append(e.Kill(process.key, process.pid))

    def _advance_drain(self, now: float) -> None:
        for index in range(len(DRAIN_ORDER)):
            if self._hosts and DRAIN_ORDER[index] in LAST:
                return
            group = [
                process for process in self.processes.values() if process.alive and drain_group(process.key[0]) == index
            ]
            for process in group:
                if not process.told_to_end:
                    self._tell_to_end(process, now)
            if group:
                return
        self.phase = RunPhase.ENDED
        self._effects.append(e.RunEnded(self._outcome, self._cause, self._culprit, self._explained))

    def _drain(self, outcome: RunOutcome, cause: str, culprit: Key | None, *, explained: bool = False) -> None:
        if self.phase == RunPhase.DRAINING:
            return
        self.phase = RunPhase.DRAINING
        self._outcome, self._cause, self._culprit, self._explained = outcome, cause, culprit, explained
        for process in self.processes.values():
            process.start_at = None
            if process.state in (ProcessState.WAITING, ProcessState.BACKOFF):
                process.state = ProcessState.STOPPED

    def _spawn(self, process: Process, now: float) -> None:
        process.state = ProcessState.STARTING
        process.start_at = None
        process.served = False
        process.incarnation = 0
        process.ready_by = now + self._start_limit_s
        self._effects.append(e.Spawn(process.key))

    def _tell_to_end(self, process: Process, now: float) -> None:
        if process.told_to_end:
            return
        process.told_to_end = True
        process.ready_by = None
        if process.pid:
            process.kill_at = self._kill_at(process, now)
            self._effects.append(e.Terminate(process.key, process.pid))

    def drain_limit_s(self, key: Key) -> float:
        """Return how many seconds a process may take to exit when the run ends."""
        return DRAIN_LIMIT_S + (self._save_limit_s if key[0] in SAVES else 0.0)

    def _kill_at(self, process: Process, now: float) -> float:
        return now + (self.drain_limit_s(process.key) if self.phase == RunPhase.DRAINING else DRAIN_LIMIT_S)


def _is_active(process: Process) -> bool:
    """Return whether a process should be running."""
    return process.state != ProcessState.DRAINED and process.drain_by is None and not process.given_up
