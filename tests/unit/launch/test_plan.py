"""Tests which processes a name selects, and which modules those processes run."""

from __future__ import annotations

import pytest

from launch.processes.plan import Key, module_of, select
from shared.rpc.errors import RpcError


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("rollout", [("rollout", 0), ("rollout", 1)]), ("rollout/1", [("rollout", 1)]), ("monitor", [("monitor", 0)])],
)
def test_names_select_processes(name: str, chosen: list[Key]) -> None:
    assert select(name, [("rollout", 0), ("rollout", 1), ("monitor", 0)]) == chosen


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rolout", "did you mean 'rollout'"),
        ("rollout/7", "available: rollout/0"),
        ("zzz", "available: monitor, rollout"),
        ("rollout/x", "write"),
    ],
)
def test_wrong_names_are_refused_and_the_valid_names_listed(name: str, said: str) -> None:
    with pytest.raises(RpcError, match=said):
        select(name, [("rollout", 0), ("monitor", 0)])


def test_service_names_become_modules() -> None:
    assert module_of("batch-store") == "services.batch_store"
    assert module_of("policy-trainer-worker") == "services.policy_trainer.worker"
