"""Tests the supervisor's decisions without processes or sleeps: start order, restarts, draining, failing."""

from __future__ import annotations

import pytest

from launch.supervisor import events as e
from launch.supervisor import state as s
from launch.supervisor.events import RunOutcome
from launch.supervisor.state import RunPhase
from shared.actor.service import UNUSABLE_STATUS, ProcessState
from tests.unit.launch.supervised import (
    DRIVER,
    MONITOR,
    PLAN,
    RECORDER,
    REFERENCE,
    ROLLOUT,
    SCHEDULER,
    SIGKILL,
    START_LIMIT_S,
    STORE,
    WORKER,
    World,
)


def test_first_services_start_before_the_others() -> None:
    world = World()
    world.feed(e.TimePassed())
    assert world.spawned == [SCHEDULER, STORE, MONITOR]


def test_others_start_at_once_when_all_first_services_are_ready() -> None:
    world = World()
    world.feed(e.TimePassed())
    world.report(SCHEDULER, ProcessState.READY)
    world.report(STORE, ProcessState.READY)
    assert len(world.spawned) == 3
    world.report(MONITOR, ProcessState.READY)
    assert world.spawned[3:] == [WORKER, DRIVER, REFERENCE, ROLLOUT]


def test_run_is_running_when_all_are_ready() -> None:
    assert World().run().state.phase == RunPhase.RUNNING


def test_killed_process_starts_again_at_once() -> None:
    world = World().run()
    world.exit(ROLLOUT, SIGKILL)
    assert world.spawned == [ROLLOUT]
    assert world.state.processes[ROLLOUT].restarts == 1
    assert world.died[0].cause == "killed by SIGKILL"


def test_process_that_is_killed_again_starts_at_once_if_it_was_ready_and_after_a_delay_if_not() -> None:
    world = World().run()
    for _ in range(3):
        world.exit(ROLLOUT, SIGKILL)
        world.report(ROLLOUT, ProcessState.READY)
    for _ in range(4):
        world.exit(ROLLOUT, SIGKILL)
        world.wait(s.KILL_BACKOFF_S)
    assert [each.delay_s for each in world.died] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_the_run_is_calm_while_every_process_is_ready_and_the_run_is_not_stopping() -> None:
    world = World()
    world.feed(e.TimePassed())
    assert not world.state.calm
    world = World().run()
    assert world.state.calm
    world.exit(ROLLOUT, SIGKILL)
    assert not world.state.calm
    world.report(ROLLOUT, ProcessState.READY)
    assert world.state.calm
    world.feed(e.DrainAsked([ROLLOUT]))
    assert world.state.calm
    world.feed(e.EndAsked("enough"))
    assert not world.state.calm


def test_a_service_waits_for_its_spare_before_its_first_start_only() -> None:
    world = World(held=[ROLLOUT[0]])
    world.feed(e.TimePassed())
    for key in PLAN:
        if key != ROLLOUT:
            world.report(key, ProcessState.READY)
    assert ROLLOUT not in world.spawned
    assert world.state.phase == RunPhase.STARTING
    world.feed(e.SpareSettled([ROLLOUT[0]]))
    assert world.spawned.count(ROLLOUT) == 1
    world.report(ROLLOUT, ProcessState.READY)
    assert world.state.phase == RunPhase.RUNNING
    world.exit(ROLLOUT, SIGKILL)
    assert world.spawned.count(ROLLOUT) == 2


def test_failed_process_starts_again_after_a_delay_that_doubles() -> None:
    world = World().run()
    delays = []
    for _ in range(3):
        world.exit(ROLLOUT, 1)
        delays.append(world.died[-1].delay_s)
        world.wait(delays[-1] - 0.01)
        count = len(world.spawned)
        world.wait(0.01)
        assert len(world.spawned) == count + 1
    assert delays == [0.25, 0.5, 1.0]


def test_run_fails_with_the_cause_of_a_process_that_fails_too_often() -> None:
    world = World().run()
    for _ in range(s.FAILURE_LIMIT):
        world.report(ROLLOUT, ProcessState.FAILED, "canary does not match")
        world.exit(ROLLOUT, 1)
        world.wait(s.FAILURE_BACKOFF_S)
    assert world.state.phase == RunPhase.DRAINING
    for group in ([DRIVER], [REFERENCE], [WORKER], [STORE], [MONITOR], [SCHEDULER]):
        for key in group:
            world.exit(key, 0)
    (ended,) = world.ended
    assert ended.outcome == RunOutcome.FAILED
    assert (ended.key, ended.explained) == (ROLLOUT, False)
    assert "canary does not match" in ended.cause


def test_failures_far_apart_do_not_add_up() -> None:
    world = World().run()
    for _ in range(3 * s.FAILURE_LIMIT):
        world.exit(ROLLOUT, 1)
        world.wait(s.WINDOW_S)
        world.report(ROLLOUT, ProcessState.READY)
    assert world.state.phase == RunPhase.RUNNING


def test_kills_do_not_fail_the_run_even_if_as_many_failures_would() -> None:
    world = World().run()
    for _ in range(2 * s.FAILURE_LIMIT):
        world.exit(ROLLOUT, SIGKILL)
        world.wait(s.KILL_BACKOFF_S)
        world.report(ROLLOUT, ProcessState.READY)
    assert world.state.phase == RunPhase.RUNNING
    assert world.state.processes[ROLLOUT].restarts == 2 * s.FAILURE_LIMIT


def test_a_process_that_exits_because_another_process_died_does_not_count_as_failed() -> None:
    world = World().run()
    for _ in range(2 * s.FAILURE_LIMIT):
        world.report(WORKER, ProcessState.FAILED, "the group has ended: policy-trainer-worker/1 was restarted")
        world.exit(WORKER, 75)
        assert "was restarted" in world.died[-1].cause
        world.wait(s.KILL_BACKOFF_S)
        world.report(WORKER, ProcessState.READY)
    assert world.state.phase == RunPhase.RUNNING
    for _ in range(s.FAILURE_LIMIT):
        world.report(WORKER, ProcessState.FAILED, "out of memory")
        world.exit(WORKER, 1)
        world.wait(s.FAILURE_BACKOFF_S)
    assert world.state.phase == RunPhase.DRAINING


def test_a_first_start_that_is_refused_fails_the_run_at_once_with_its_cause() -> None:
    world = World()
    world.feed(e.TimePassed())
    world.report(STORE, ProcessState.FAILED, "services.batch-store.directory: not writable")
    world.exit(STORE, UNUSABLE_STATUS)
    assert world.died == []
    assert set(world.terminated) == {MONITOR}
    world.exit(MONITOR, 0)
    world.exit(SCHEDULER, 0)
    [ended] = world.ended
    assert (ended.outcome, ended.key, ended.explained) == (RunOutcome.FAILED, STORE, True)
    assert ended.cause.startswith("batch-store/0: services.batch-store.directory: not writable (another start")
    assert world.spawned == [SCHEDULER, STORE, MONITOR]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_a_process_that_meets_a_bad_input_fails_the_run_after_this_one_death(again: bool, ready: bool) -> None:
    world = World().run()
    if again:
        world.exit(DRIVER, SIGKILL)
        if ready:
            world.report(DRIVER, ProcessState.READY)
    died, spawned = len(world.died), len(world.spawned)
    world.report(DRIVER, ProcessState.FAILED, "rollout/0: the judge has not answered for 600 s")
    world.exit(DRIVER, UNUSABLE_STATUS)
    assert world.state.phase == RunPhase.DRAINING
    assert world.state.end[1].startswith("policy-trainer/0: rollout/0: the judge has not answered for 600 s (another")
    assert (len(world.died), len(world.spawned)) == (died, spawned)


def test_driver_that_fails_is_restarted() -> None:
    world = World().run()
    world.exit(DRIVER, 1)
    world.wait(1.0)
    assert world.spawned == [DRIVER]


def test_driver_that_exits_with_work_left_is_restarted() -> None:
    world = World().run()
    world.exit(DRIVER, 0, run_complete=False)
    world.wait(1.0)
    assert world.spawned == [DRIVER]
    assert world.state.phase == RunPhase.RUNNING


def test_another_service_that_exits_on_its_own_is_restarted() -> None:
    world = World().run()
    world.report(STORE, ProcessState.STOPPED)
    world.exit(STORE, 0)
    world.wait(1.0)
    assert world.spawned == [STORE]


def test_services_are_drained_in_order_after_the_driver_is_done() -> None:
    world = World().run()
    world.exit(DRIVER, 0)
    order = []
    while not world.ended:
        group = [key for key in world.terminated if key not in order]
        assert group, "no process was told to exit"
        order += group
        for key in group:
            world.report(key, ProcessState.STOPPED)
            world.exit(key, 0)
    assert order == [REFERENCE, ROLLOUT, WORKER, STORE, MONITOR, SCHEDULER]
    assert world.ended == [e.RunEnded(RunOutcome.DONE, "", None)]
    assert all(process.state == ProcessState.STOPPED for process in world.state.processes.values())


def test_process_that_dies_while_draining_is_not_restarted() -> None:
    world = World().run()
    world.feed(e.EndAsked("stopped by the operator"))
    world.exit(ROLLOUT, SIGKILL)
    world.wait(10.0)
    assert world.spawned == []


def test_process_that_does_not_drain_is_killed_only_after_the_limit() -> None:
    world = World().run()
    world.feed(e.EndAsked("interrupted"))
    assert world.terminated == [DRIVER]
    world.wait(s.DRAIN_LIMIT_S - 0.1)
    assert world.killed == []
    world.wait(0.1)
    assert world.killed == [DRIVER]


def test_a_trainer_gets_time_for_a_checkpoint_only_when_the_run_ends() -> None:
    for event, limit_s in (
        (e.EndAsked("interrupted"), s.DRAIN_LIMIT_S + 90),
        (e.RestartAsked([DRIVER]), s.DRAIN_LIMIT_S),
    ):
        world = World(save_limit_s=90).run()
        world.feed(event)
        world.report(DRIVER, ProcessState.DRAINING, "saving step 19")
        world.wait(limit_s - 0.1)
        assert world.killed == []
        world.wait(0.1)
        assert world.killed == [DRIVER]


def test_no_other_process_is_told_to_exit_before_the_driver_has_saved() -> None:
    world = World(save_limit_s=90).run()
    world.feed(e.EndAsked("interrupted"))
    world.report(DRIVER, ProcessState.DRAINING, "saving step 19")
    world.wait(80.0)
    assert world.terminated == [DRIVER]
    world.exit(DRIVER, 0)
    assert set(world.terminated) == {DRIVER, ROLLOUT, REFERENCE}
    world.wait(s.DRAIN_LIMIT_S)
    assert set(world.killed) == {ROLLOUT, REFERENCE}


def test_second_interrupt_kills_all_remaining_processes() -> None:
    world = World().run()
    world.feed(e.EndAsked("interrupted"))
    world.exit(DRIVER, 0)
    world.feed(e.EndAsked("killed", at_once=True))
    assert set(world.killed) == {key for key in PLAN if key != DRIVER}
    for key in world.killed:
        world.exit(key, SIGKILL)
    assert world.ended[0].outcome == RunOutcome.STOPPED


def test_stop_during_start_starts_no_further_processes() -> None:
    world = World()
    world.feed(e.TimePassed())
    world.feed(e.EndAsked("interrupted"))
    for key in (STORE, MONITOR, SCHEDULER):
        world.exit(key, 0)
    assert world.spawned == [SCHEDULER, STORE, MONITOR]
    assert world.ended[0].outcome == RunOutcome.STOPPED


def test_operator_restart_drains_and_restarts_without_counting_as_a_failure() -> None:
    world = World().run()
    for _ in range(2 * s.FAILURE_LIMIT):
        world.feed(e.RestartAsked([ROLLOUT]))
        assert world.terminated.pop() == ROLLOUT
        world.exit(ROLLOUT, 0)
        world.report(ROLLOUT, ProcessState.READY)
    assert world.spawned == [ROLLOUT] * 2 * s.FAILURE_LIMIT
    assert world.died == []


def test_restarted_driver_that_exits_with_success_does_not_end_the_run() -> None:
    world = World().run()
    world.feed(e.RestartAsked([DRIVER]))
    world.exit(DRIVER, 0)
    assert world.spawned == [DRIVER]
    assert world.state.phase == RunPhase.RUNNING


def test_operator_restart_ends_a_backoff_early() -> None:
    world = World().run()
    world.exit(ROLLOUT, 1)
    assert world.spawned == []
    world.feed(e.RestartAsked([ROLLOUT]))
    assert world.spawned == [ROLLOUT]


def test_report_of_an_earlier_incarnation_is_ignored() -> None:
    world = World().run()
    old_pid = world.pids[ROLLOUT]
    world.exit(ROLLOUT, SIGKILL)
    world.feed(e.Reported(ROLLOUT, old_pid, 7, ProcessState.READY))
    assert world.state.processes[ROLLOUT].state == ProcessState.STARTING


def test_report_of_an_unknown_service_is_ignored() -> None:
    world = World().run()
    world.feed(e.Reported(("rollout", 9), 5, 5, ProcessState.READY))
    assert world.state.phase == RunPhase.RUNNING


def test_process_that_never_becomes_ready_is_killed_and_counts_as_failed() -> None:
    world = World()
    world.feed(e.TimePassed())
    world.wait(START_LIMIT_S - 0.1)
    assert world.killed == []
    world.wait(0.1)
    assert world.killed == [SCHEDULER, STORE, MONITOR]
    world.exit(SCHEDULER, SIGKILL)
    assert world.died[0].cause == "not READY within 60 s of its start (run.start_limit_s)"
    assert len(world.state.processes[SCHEDULER].failures) == 1


def test_process_that_failed_but_does_not_exit_is_killed() -> None:
    world = World().run()
    world.report(ROLLOUT, ProcessState.FAILED, "out of memory")
    world.wait(s.DRAIN_LIMIT_S)
    assert world.killed == [ROLLOUT]
    world.exit(ROLLOUT, SIGKILL)
    assert world.died[0].cause == "out of memory"


def test_process_that_is_killed_because_it_hangs_counts_as_failed() -> None:
    world = World().run()
    world.feed(e.KillOrdered(ROLLOUT, world.pids[ROLLOUT], "hung on shared devices"))
    assert world.killed == [ROLLOUT]
    world.exit(ROLLOUT, SIGKILL)
    assert world.died[0].cause == "hung on shared devices"
    assert len(world.state.processes[ROLLOUT].failures) == 1
    world.feed(e.KillOrdered(ROLLOUT, world.pids[ROLLOUT] + 100, "an earlier life"))
    assert world.killed == [ROLLOUT]


def test_the_next_deadline_is_the_end_of_the_backoff() -> None:
    world = World().run()
    assert world.state.next_deadline() is None
    world.exit(ROLLOUT, 1)
    assert world.state.next_deadline() == world.now + s.FIRST_BACKOFF_S


def test_the_run_continues_without_an_optional_service_that_fails_too_often() -> None:
    world = World([*PLAN, RECORDER]).run()
    for _ in range(s.FAILURE_LIMIT):
        world.exit(RECORDER, 1)
        world.wait(s.FAILURE_BACKOFF_S)
    assert [each.key for each in world.died] == [RECORDER] * (s.FAILURE_LIMIT - 1)
    assert world.given_up == [e.GivenUp(RECORDER, "exit status 1 (death 4 in 300 s, limit 4)")]
    assert world.state.phase == RunPhase.RUNNING
    assert world.state.calm
    spawned = len(world.spawned)
    world.wait(s.WINDOW_S)
    assert len(world.spawned) == spawned
    world.feed(e.RestartAsked([RECORDER]))
    assert world.spawned[spawned:] == [RECORDER]
    world.report(RECORDER, ProcessState.READY)
    world.exit(RECORDER, 1)
    assert world.state.processes[RECORDER].state == ProcessState.BACKOFF


def test_an_optional_service_whose_start_is_refused_does_not_fail_the_run() -> None:
    world = World([*PLAN, RECORDER])
    world.feed(e.TimePassed())
    for key in PLAN:
        world.report(key, ProcessState.READY)
    world.exit(RECORDER, UNUSABLE_STATUS)
    assert world.state.phase == RunPhase.RUNNING
    assert world.given_up[0].key == RECORDER
