"""Rules for starting, using, replacing and abandoning spare processes, tested without a process."""

from __future__ import annotations

import pytest

from launch.supervisor import spares as s
from launch.supervisor.spares import SpareKind, SpareRules
from launch.supervisor.state import WINDOW_S

ROLLOUT, REFERENCE = SpareKind("rollout", 1, None), SpareKind("reference", 1, None)
SIGKILL = -9


@pytest.fixture
def rules() -> SpareRules:
    return SpareRules([ROLLOUT, REFERENCE, ROLLOUT])


def start(rules: SpareRules, pid: int = 1) -> None:
    while (kind := rules.due(calm=True)) is not None:
        rules.started(kind, pid)
        rules.warmed(kind)


def test_spares_of_each_kind_are_started_one_at_a_time_and_only_while_the_run_is_calm(rules: SpareRules) -> None:
    assert rules.due(calm=False) is None
    assert rules.due(calm=True) == ROLLOUT
    rules.started(ROLLOUT, 7)
    assert rules.due(calm=True) is None
    rules.warmed(ROLLOUT)
    assert rules.due(calm=False) is None
    assert rules.due(calm=True) == REFERENCE
    rules.started(REFERENCE, 8)
    rules.warmed(REFERENCE)
    assert rules.due(calm=True) is None


def test_a_spare_is_used_once_and_then_replaced(rules: SpareRules) -> None:
    start(rules)
    assert rules.take(ROLLOUT)
    assert not rules.take(ROLLOUT)
    assert rules.due(calm=True) == ROLLOUT


def test_a_start_does_not_wait_for_a_spare_that_is_still_importing(rules: SpareRules) -> None:
    rules.started(ROLLOUT, 7)
    assert not rules.take(ROLLOUT)
    rules.warmed(ROLLOUT)
    assert rules.take(ROLLOUT)


def test_spares_are_complete_when_every_kind_is_warm_or_given_up(rules: SpareRules) -> None:
    assert not rules.complete
    rules.started(ROLLOUT, 7)
    rules.warmed(ROLLOUT)
    assert not rules.complete
    rules.started(REFERENCE, 8)
    rules.exited(REFERENCE, 1, 0.0)
    assert rules.complete


def test_a_kind_whose_imports_fail_is_given_up_at_once(rules: SpareRules) -> None:
    rules.started(ROLLOUT, 7)
    assert rules.exited(ROLLOUT, 1, 0.0) == "exit status 1"
    assert rules.due(calm=True) == REFERENCE


def test_a_killed_spare_is_replaced_until_too_many_were_killed_within_the_window(rules: SpareRules) -> None:
    for _ in range(s.KILL_LIMIT - 1):
        start(rules)
        assert rules.exited(ROLLOUT, SIGKILL, 0.0) == ""
    start(rules)
    assert rules.exited(ROLLOUT, SIGKILL, WINDOW_S + 1.0) == ""
    assert rules.due(calm=True) == ROLLOUT
    start(rules)
    assert rules.exited(ROLLOUT, SIGKILL, WINDOW_S + 1.0) == ""
    start(rules)
    assert "kill 3 in 300 s, limit 3" in rules.exited(ROLLOUT, SIGKILL, WINDOW_S + 1.0)
    assert rules.due(calm=True) is None


def test_processes_with_other_devices_or_threads_do_not_share_a_spare() -> None:
    first, second, threads = (SpareKind("rollout", 1, "0"), SpareKind("rollout", 1, "1"), SpareKind("rollout", 2, "0"))
    rules = SpareRules([first, second, threads])
    rules.started(first, 7)
    rules.warmed(first)
    assert not rules.take(second)
    assert not rules.take(threads)
    assert rules.take(first)
