"""Tests the rules for starting, using, replacing and giving up spare processes, without starting a process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.spares import spare
from launch.spares.heavy import spare_kinds
from launch.spares.state import SpareKind, SpareRules
from launch.supervisor.state import WINDOW_S
from shared.topology import load

TORCH, VLLM = SpareKind(("policy-trainer-worker", "reference"), ("torch",)), SpareKind(("rollout",), ("vllm",))
SIGKILL = -9
QUICKSTART = Path(__file__).parents[3] / "launch" / "topologies" / "quickstart.yaml"


@pytest.fixture
def rules() -> SpareRules:
    return SpareRules([TORCH, VLLM])


def start(rules: SpareRules, pid: int = 1) -> None:
    for kind in rules.missing:
        rules.started(kind, pid)
        rules.warmed(kind)


def test_a_spare_can_be_used_after_its_imports_until_it_is_lost(rules: SpareRules) -> None:
    assert not rules.usable(TORCH)
    rules.started(TORCH, 7)
    assert not rules.usable(TORCH)
    rules.warmed(TORCH)
    assert rules.usable(TORCH)
    assert rules.usable(TORCH)
    assert not rules.usable(VLLM)
    rules.lost(TORCH)
    assert not rules.usable(TORCH)
    assert rules.missing == [VLLM]  # The lost spare is being killed.


def test_spares_are_complete_when_every_kind_is_warm_or_given_up(rules: SpareRules) -> None:
    assert not rules.complete
    rules.started(TORCH, 7)
    rules.warmed(TORCH)
    assert not rules.complete
    rules.started(VLLM, 8)
    assert not rules.complete
    rules.exited(VLLM, 1, 0.0)
    assert rules.complete


def test_a_kind_whose_imports_fail_is_given_up_at_once(rules: SpareRules) -> None:
    rules.started(TORCH, 7)
    assert rules.exited(TORCH, 1, 0.0) == "exit status 1"
    assert rules.missing == [VLLM]


def test_a_kind_whose_imports_crash_is_given_up_at_once(rules: SpareRules) -> None:
    rules.started(TORCH, 7)
    assert rules.exited(TORCH, -signal.SIGSEGV, 0.0) == "killed by SIGSEGV"
    assert rules.missing == [VLLM]


def test_a_kind_that_was_given_up_has_nothing_to_report_when_its_spare_exits(rules: SpareRules) -> None:
    rules.started(TORCH, 7)
    rules.give_up(TORCH, "too slow")
    assert rules.exited(TORCH, SIGKILL, 0.0) == ""


def test_services_share_a_spare_except_rollouts_with_vllm_and_a_host_imports_what_its_services_need() -> None:
    every = ("policy-trainer-worker", "reference", "rollout", "scheduler")
    quickstart, vllm = load(QUICKSTART, []), load(QUICKSTART, ["services.rollout.engine=vllm"])
    (kind,) = spare_kinds(quickstart, every)
    assert kind.services == every[:3]
    assert [kind.services for kind in spare_kinds(vllm, every)] == [every[:2], every[2:3]]
    (kind,) = spare_kinds(load(QUICKSTART, ["services.policy-trainer.backend=megatron"]), ("rollout",))
    assert kind.services == ("rollout",)
    assert not any("policy_trainer" in each for each in kind.imports)
    assert spare_kinds(quickstart, ("scheduler",)) == []
    assert spare_kinds(load(QUICKSTART, ["run.spares=false"]), every) == []


def test_a_killed_spare_is_replaced_until_too_many_were_killed_within_the_window(rules: SpareRules) -> None:
    for _ in range(2):
        start(rules)
        assert rules.exited(TORCH, SIGKILL, 0.0) == ""
    start(rules)
    assert rules.exited(TORCH, SIGKILL, WINDOW_S + 1.0) == ""
    assert rules.missing == [TORCH]
    start(rules)
    assert rules.exited(TORCH, SIGKILL, WINDOW_S + 1.0) == ""
    start(rules)
    assert "kill 3 in 300 s, limit 3" in rules.exited(TORCH, SIGKILL, WINDOW_S + 1.0)
    assert rules.missing == []


def test_a_process_with_threads_or_an_initialized_cuda_driver_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/dev/null")
    (tmp_path / "1").symlink_to("/dev/nvidiactl")
    assert spare.why_not_to_fork(1, spare.open_files(tmp_path)) == ""
    (tmp_path / "2").symlink_to("/dev/nvidia-uvm")
    assert "have initialized the driver of a GPU" in spare.why_not_to_fork(1, spare.open_files(tmp_path))
    assert "have started 2 threads" in spare.why_not_to_fork(3, [])
