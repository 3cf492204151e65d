"""Tests the numbers that the measurement of large runs prints beside the plan's."""

from __future__ import annotations

import pytest

from shared.topology import load
from shared.topology.capacity import Parameters
from shared.topology.memory_plan import uses
from tests.bench.bench_colocate import QUICKSTART, Memory
from tests.bench.half_billion import ALL, Run, peak_bytes, planned, process_of, show


def test_the_plan_of_each_window_is_the_training_state_and_the_copies_of_that_time() -> None:
    plan = planned(uses(load(QUICKSTART, ["policy.dtype=bfloat16"]), {"policy": Parameters(1000)}, {}))
    of_trainer = {"load": 8000, "publish": 6000, "steps": 18_000, "checkpoint": 28_000, "export": 0}
    assert plan["policy_trainer.worker/0"] == of_trainer
    assert plan["reference/0"] == {"load": 2000, "publish": 2000, "steps": 2000, "checkpoint": 2000, "export": 0}
    two = ["policy.dtype=bfloat16", "services.policy-trainer.workers=2"]
    ranks = planned(uses(load(QUICKSTART, two), {"policy": Parameters(1000)}, {}))
    assert ranks["policy_trainer.worker/0"]["publish"] == 2000 + 2000
    assert ranks["policy_trainer.worker/1"]["checkpoint"] == 2000 + 4000


def test_the_peak_of_a_window_is_that_of_its_own_time() -> None:
    memory = Memory([(1.0, {"a/0": 5, "a/1": 3}), (2.0, {"a/0": 9}), (3.0, {"a/0": 2, "a/1": 8})])
    assert [peak_bytes(memory, "a/1", *window) for window in ((0, 1), (2, 2), (2, 4))] == [3, 0, 8]
    assert peak_bytes(memory, ALL, 0, 4) == 10
    assert peak_bytes(memory, ALL, 4, 5) is None


def test_ranks_are_told_apart_by_their_instance() -> None:
    command = ["python", "-m", "services.policy_trainer.worker", "--run", "r", "--instance", "1", "--parent", "7"]
    assert process_of(command) == "policy_trainer.worker/1"
    assert process_of(["python", "-m", "launch.spares.spare"]) == "other"


def test_figures_are_printed_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"a/0": {"load": 80, "publish": 60, "steps": 180, "checkpoint": 280, "export": 0}}
    looks = [(0.5, {"a/0": 90}), (1.5, {"a/0": 70}), (2.5, {"a/0": 190}), (4.5, {"a/0": 20})]
    show("tiny", Run(Memory(looks), [{"time/step": 1.0}], (0, 1, 2, 3, 4, 5), plan, 10))
    last = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(last.split()) == "a/0 9.0 (8.0) 7.0 (6.0) 19.0 (18.0) - (28.0) 2.0 (0.0)"
