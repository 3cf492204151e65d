"""Tests the supervisor's decisions about processes that an operator drains, adds or restarts one after another."""

from __future__ import annotations

import pytest

from launch.processes.plan import rolling_order
from launch.supervisor import events as e
from launch.supervisor import state as s
from launch.supervisor.events import RunOutcome
from launch.supervisor.state import RunPhase
from shared.actor.service import ProcessState
from tests.unit.launch.supervised import (
    DRIVER,
    MONITOR,
    PLAN,
    REFERENCE,
    ROLLOUT,
    SCHEDULER,
    SIGKILL,
    STORE,
    WORKER,
    World,
)


def test_drained_process_finishes_its_leases_and_is_not_restarted() -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    assert (world.retired, world.terminated) == ([ROLLOUT], [])
    world.report(ROLLOUT, ProcessState.DRAINING)
    world.exit(ROLLOUT, 0)
    world.wait(3600)
    assert world.state.processes[ROLLOUT].state == ProcessState.DRAINED
    assert world.spawned == []
    assert world.state.phase == RunPhase.RUNNING


def test_process_killed_while_it_drains_is_not_restarted() -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    world.exit(ROLLOUT, SIGKILL)
    assert world.state.processes[ROLLOUT].state == ProcessState.DRAINED
    assert (world.spawned, world.died) == ([], [])


def test_process_that_does_not_finish_its_leases_is_told_to_exit_and_then_killed() -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    world.wait(s.RETIRE_LIMIT_S - 1)
    assert world.terminated == []
    world.wait(1)
    assert world.terminated == [ROLLOUT]
    world.wait(s.DRAIN_LIMIT_S)
    assert world.killed == [ROLLOUT]
    world.exit(ROLLOUT, SIGKILL)
    assert world.state.processes[ROLLOUT].state == ProcessState.DRAINED
    assert world.state.next_deadline() is None


def test_process_that_is_not_ready_is_drained_without_waiting_for_leases() -> None:
    world = World().run()
    world.exit(ROLLOUT, 1)  # The process is in BACKOFF.
    world.feed(e.DrainAsked([ROLLOUT]))
    assert world.state.processes[ROLLOUT].state == ProcessState.DRAINED
    world.wait(60)
    assert world.spawned == []


@pytest.mark.parametrize("event", [e.StartAsked, e.RestartAsked])
def test_drained_process_starts_again_on_request(event: type[e.StartAsked | e.RestartAsked]) -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    world.exit(ROLLOUT, 0)
    world.feed(event([ROLLOUT]))
    assert world.spawned == [ROLLOUT]


def test_process_requested_while_it_drains_starts_again_without_counting_as_failed() -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    world.feed(e.StartAsked([ROLLOUT]))
    world.report(ROLLOUT, ProcessState.DRAINING)
    world.exit(ROLLOUT, 0)
    assert world.spawned == [ROLLOUT]
    assert world.died == []


def test_new_instance_is_restarted_after_a_kill_and_ends_with_the_run() -> None:
    world = World().run()
    new = ("rollout", 1)
    world.feed(e.StartAsked([ROLLOUT, new]))
    assert world.spawned == [new]
    world.report(new, ProcessState.READY)
    world.exit(new, SIGKILL)
    assert world.spawned == [new, new]
    world.feed(e.EndAsked("stopped"))
    world.exit(DRIVER, 0)
    assert new in world.terminated


def test_run_ends_while_a_process_drains() -> None:
    world = World().run()
    world.feed(e.DrainAsked([ROLLOUT]))
    world.feed(e.EndAsked("stopped"))
    for key in (DRIVER, ROLLOUT, REFERENCE, WORKER, STORE, MONITOR, SCHEDULER):
        world.exit(key, 0)
    assert [each.outcome for each in world.ended] == [RunOutcome.STOPPED]


def test_rolling_restart_stops_each_group_once_the_previous_group_is_ready() -> None:
    world = World().run()
    groups = rolling_order(PLAN, {})
    assert [group[0] for group in groups] == [MONITOR, ROLLOUT, REFERENCE, WORKER, DRIVER, STORE, SCHEDULER]
    world.feed(e.RollingRestartAsked(groups))
    for number, [key] in enumerate(groups, 1):
        assert len(world.terminated) == number
        assert world.terminated[-1] == key
        world.exit(key, 0)
        world.wait(5)
        assert len(world.terminated) == number, "the next waits for READY"
        world.report(key, ProcessState.READY)
    assert [process.restarts for process in world.state.processes.values()] == [1] * len(PLAN)


def test_rolling_restart_waits_while_another_process_is_down() -> None:
    world = World().run()
    world.feed(e.RollingRestartAsked([[MONITOR], [ROLLOUT]]))
    world.exit(MONITOR, 0)
    world.exit(STORE, SIGKILL)
    world.report(MONITOR, ProcessState.READY)
    assert world.terminated == [MONITOR]
    world.report(STORE, ProcessState.READY)
    assert world.terminated == [MONITOR, ROLLOUT]


def test_ranks_of_one_model_are_restarted_together() -> None:
    keys = [*PLAN, ("policy-trainer-worker", 1), ("reference", 1), ("reference", 2), ("reference", 3)]
    groups = rolling_order(keys, {"policy-trainer-worker": 2, "reference": 2})
    assert [WORKER, ("policy-trainer-worker", 1)] in groups
    assert [("reference", 0), ("reference", 1)] in groups
    assert [("reference", 2), ("reference", 3)] in groups
