"""Tests the rules for the kinds of spare processes and for giving them up, without starting a process."""

from __future__ import annotations

import signal
from collections import deque
from pathlib import Path

import pytest

from launch.spares import spare
from launch.spares.processes import WINDOW_S, spare_kinds, why_to_give_up
from shared.topology import load

SIGKILL = -9
QUICKSTART = Path(__file__).parents[3] / "launch" / "topologies" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("status", "cause"), [(1, "exit status 1"), (-signal.SIGSEGV, "killed by SIGSEGV")], ids=["error", "crash"]
)
def test_a_kind_whose_imports_fail_is_given_up_at_once(status: int, cause: str) -> None:
    assert why_to_give_up(deque(), status, 0.0) == cause


def test_services_share_a_spare_except_rollouts_with_vllm_and_a_host_imports_what_its_services_need() -> None:
    every = ("policy-trainer-worker", "reference", "rollout", "batch-store")
    quickstart, vllm = load(QUICKSTART, []), load(QUICKSTART, ["services.rollout.engine=vllm"])
    (kind,) = spare_kinds(quickstart, every)
    assert kind.services == every[:3]
    assert [kind.services for kind in spare_kinds(vllm, every)] == [every[:2], every[2:3]]
    (kind,) = spare_kinds(load(QUICKSTART, ["services.policy-trainer.backend=megatron"]), ("rollout",))
    assert kind.services == ("rollout",)
    assert not any("policy_trainer" in each for each in kind.imports)
    assert spare_kinds(quickstart, ("scheduler",)) == []
    (light, heavy) = spare_kinds(quickstart, (*every, "monitor"))
    assert light == (("batch-store", "monitor"), ("services.batch_store.server", "services.monitor.server"))
    assert heavy.services == every[:3]
    assert spare_kinds(load(QUICKSTART, ["run.spares=false"]), every) == []


def test_a_killed_spare_is_replaced_until_too_many_were_killed_within_the_window() -> None:
    kills: deque[float] = deque()
    for _ in range(2):
        assert why_to_give_up(kills, SIGKILL, 0.0) == ""
    for _ in range(2):
        assert why_to_give_up(kills, SIGKILL, WINDOW_S + 1.0) == ""
    assert "kill 3 in 300 s, limit 3" in why_to_give_up(kills, SIGKILL, WINDOW_S + 1.0)


def test_a_process_with_threads_or_an_initialized_cuda_driver_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/dev/null")
    (tmp_path / "1").symlink_to("/dev/nvidiactl")
    assert spare.why_not_to_fork(1, spare.open_files(tmp_path)) == ""
    (tmp_path / "2").symlink_to("/dev/nvidia-uvm")
    assert "have initialized the driver of a GPU" in spare.why_not_to_fork(1, spare.open_files(tmp_path))
    assert "have started 2 threads" in spare.why_not_to_fork(3, [])
