"""`services.rollout.in_flight` and `consume`: what goes together and what is refused, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.topology import load
from tests.unit.small_topology import make, problems, write

KEEP = "services.rollout.in_flight=keep"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


def test_blocks_wait_unless_the_topology_says_keep(folder: Path) -> None:
    assert load(write(folder)).services.rollout.in_flight == "wait"
    assert load(write(folder), [KEEP]).services.rollout.in_flight == "keep"


def test_completion_order_is_available(folder: Path) -> None:
    assert load(write(folder), ["consume=completion"]).consume == "completion"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("services.rollout.engine=vllm", "vllm updates between blocks"),
        ("workflow.function=builtin:single_turn", "a workflow's calls are short blocks"),
    ],
)
def test_keep_is_refused_where_it_would_do_nothing(folder: Path, override: str, why: str) -> None:
    lines = problems(write(folder), override, KEEP, check_supported=False)
    assert [line for line in lines if "services.rollout.in_flight: " in line and why in line]


def test_keep_is_refused_in_deterministic_mode(folder: Path) -> None:
    lines = problems(write(folder), "run.deterministic=true", KEEP, check_supported=False)
    assert [line for line in lines if "services.rollout.in_flight: keep depends on timing" in line]
