"""Tests how a run ends if it has processes on other hosts."""

from __future__ import annotations

from launch.supervisor.events import (
    EndAsked,
    Exited,
    HostsEnded,
    Reported,
    RunEnded,
    RunOutcome,
    Spawn,
    Spawned,
    Terminate,
    TimePassed,
)
from launch.supervisor.state import RunLifecycle
from shared.actor.service import ProcessState

STORE, SCHEDULER, DRIVER = ("batch-store", 0), ("scheduler", 0), ("policy-trainer", 0)


def running() -> RunLifecycle:
    """Return a run whose three processes are READY. The pid of a process is its position, counted from 1."""
    made = RunLifecycle([SCHEDULER, STORE, DRIVER], start_limit_s=600.0, hosts=True)
    pending = made.handle(TimePassed(), 0.0)
    while pending:
        effect = pending.pop()
        if isinstance(effect, Spawn):
            pid = list(made.processes).index(effect.key) + 1
            made.handle(Spawned(effect.key, pid), 0.0)
            pending += made.handle(Reported(effect.key, pid, 1, ProcessState.READY), 0.0)
    return made


def told_to_end(effects: list[object]) -> list[object]:
    return [each.key for each in effects if isinstance(each, Terminate)]


def test_processes_to_which_other_hosts_connect_run_until_those_hosts_have_ended() -> None:
    made = running()
    assert told_to_end([*made.handle(EndAsked("test"), 1.0)]) == [DRIVER]
    assert made.handle(Exited(DRIVER, 3, 0), 2.0) == []
    assert made.handle(TimePassed(), 60.0) == []
    assert told_to_end([*made.handle(HostsEnded(), 61.0)]) == [STORE]


def test_a_kill_does_not_wait_for_other_hosts() -> None:
    made = running()
    made.handle(EndAsked("killed", at_once=True), 1.0)
    made.handle(Exited(DRIVER, 3, -9), 2.0)
    made.handle(Exited(STORE, 2, -9), 2.0)
    [ended] = made.handle(Exited(SCHEDULER, 1, -9), 2.0)
    assert isinstance(ended, RunEnded)


def test_a_host_whose_processes_cannot_continue_fails_the_run_with_the_cause() -> None:
    made = running()
    made.handle(EndAsked("host b: rollout/0: no model", RunOutcome.FAILED), 1.0)
    made.handle(Exited(DRIVER, 3, 0), 2.0)
    made.handle(HostsEnded(), 3.0)
    made.handle(Exited(STORE, 2, 0), 4.0)
    effects = made.handle(Exited(SCHEDULER, 1, 0), 5.0)
    assert effects == [RunEnded(RunOutcome.FAILED, "host b: rollout/0: no model", None)]
