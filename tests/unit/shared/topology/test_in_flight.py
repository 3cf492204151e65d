"""Tests valid and refused combinations of `services.rollout.in_flight` and `consume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.topology import load
from tests.unit.shared.topology.small_topology import problems, write

KEEP = "services.rollout.in_flight=keep"


def test_weights_change_only_between_blocks_unless_the_topology_sets_keep(folder: Path) -> None:
    assert load(write(folder)).services.rollout.in_flight == "wait"
    assert load(write(folder), [KEEP]).services.rollout.in_flight == "keep"


def test_vllm_supports_both_modes(folder: Path) -> None:
    for mode in ("keep", "recompute"):
        overrides = ["services.rollout.engine=vllm", f"services.rollout.in_flight={mode}"]
        assert load(write(folder), overrides).services.rollout.in_flight == mode


def test_a_temperature_that_vllm_refuses_is_refused_at_the_start(folder: Path) -> None:
    overrides = ["services.rollout.engine=vllm", "sampling.temperature=2.5"]
    (line,) = [each for each in problems(write(folder), *overrides) if "sampling.temperature: " in each]
    assert "2.5 is more than vllm accepts; use at most 2.0" in line
    assert load(write(folder), ["sampling.temperature=2.5"]).sampling.temperature == 2.5


def test_tensor_parallelism_needs_vllm(folder: Path) -> None:
    two = "services.rollout.parallel.tp=2"
    assert load(write(folder), [two, "services.rollout.engine=vllm"]).services.rollout.parallel.tp == 2
    (line,) = [each for each in problems(write(folder), two) if "services.rollout.parallel.tp: " in each]
    assert "transformers has no tensor parallelism; use 1" in line


def test_completion_order_can_be_chosen(folder: Path) -> None:
    assert load(write(folder), ["consume=completion"]).consume == "completion"


@pytest.mark.parametrize(
    ("override", "mode", "why"),
    [
        ("services.rollout.engine=openai", "keep", "openai updates between blocks"),
        ("services.rollout.engine=openai", "recompute", "openai updates between blocks"),
        ("services.rollout.engine=transformers", "recompute", "transformers supports keep; use keep"),
        ("workflow.function=builtin:single_turn", "keep", "a workflow's calls are short blocks"),
    ],
)
def test_an_update_is_refused_where_it_has_no_effect(folder: Path, override: str, mode: str, why: str) -> None:
    lines = problems(write(folder), override, f"services.rollout.in_flight={mode}")
    assert [line for line in lines if "services.rollout.in_flight: " in line and why in line]


def test_keep_is_refused_in_deterministic_mode(folder: Path) -> None:
    lines = problems(write(folder), "run.deterministic=true", KEEP)
    assert [line for line in lines if "services.rollout.in_flight: keep depends on timing" in line]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("services.rollout.engine_args.url=x", "engine_args.url: engine openai takes no such argument; use base_url"),
        ("services.rollout.engine_args.base_url=host:1", "'host:1' is not an http address"),
        ("services.rollout.instances=2", "services.rollout.instances: 2 would overwrite one another's weights"),
        ("services.rollout.parallel.tp=2", "openai has no tensor parallelism; use 1"),
        ("sampling.temperature=2.5", "2.5 is more than openai accepts"),
    ],
)
def test_options_that_a_server_does_not_support_are_refused(folder: Path, override: str, why: str) -> None:
    server = [
        "services.rollout.engine=openai",
        "services.rollout.engine_args.base_url=http://127.0.0.1:1",
        "services.rollout.instances=1",
    ]
    assert load(write(folder), server).services.rollout.engine == "openai"
    assert [line for line in problems(write(folder), *server, override) if why in line]
