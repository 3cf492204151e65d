"""Tests the numbers of an optimizer step: how the driver computes them, and which ones a worker refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from transformers import get_scheduler

from launch.checks.findings import Findings
from launch.checks.schedule import check_schedule
from proto.messages import (
    Ack,
    BatchMeta,
    CommitStep,
    ErrorCode,
    GetRunInfo,
    GetWorkerState,
    NextBatch,
    RunInfo,
    StepBatch,
    WorkerState,
)
from proto.registry import Message, Request
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.driver import Driver
from services.policy_trainer.resume import ResumePoint, committed_rates, resume
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.update import learning_rate, optimizer_numbers
from services.policy_trainer.worker.calls.training import check_optimizer
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.topology import Topology, TopologyError, load
from shared.topology.algorithm import Optimizer
from shared.topology.models import POLICY
from tests.unit.policy_trainer.training import adamw
from tests.unit.shared.topology.small_topology import edited, make

ROOT = Path(__file__).resolve().parents[3]


def test_warm_up_is_linear_and_then_constant() -> None:
    options = Optimizer(lr=1e-2, warmup_steps=4)
    rates = [optimizer_numbers(options, step).lr for step in (1, 2, 4, 9)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 1e-2, 1e-2])


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_linear_and_cosine_schedules_fall_from_the_end_of_warm_up_to_the_floor(floor: float) -> None:
    linear, cosine = (
        Optimizer(lr=1.0, warmup_steps=10, schedule=name, min_lr=floor, decay_steps=110)
        for name in ("linear", "cosine")
    )
    for options in (linear, cosine):
        rates = [learning_rate(options, step) for step in (0, 1, 10, 60, 110, 1000)]
        assert rates == pytest.approx([0.0, 0.1, 1.0, (1 + floor) / 2, floor, floor])
        assert learning_rate(options, 109) > floor == learning_rate(options, 110)
    assert learning_rate(linear, 35) == pytest.approx(1 - 0.25 * (1 - floor))
    assert learning_rate(cosine, 35) == pytest.approx(floor + (1 - floor) * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    ("peer", "schedule", "floor"),
    [
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine_with_min_lr", "cosine", 0.3),
        ("constant_with_warmup", "constant", 0.0),
    ],
)
def test_an_update_has_the_rate_that_transformers_gives_to_the_next_one(
    peer: str, schedule: Any, floor: float, warmup: int
) -> None:
    end = None if schedule == "constant" else 50
    options = Optimizer(lr=2.0, warmup_steps=warmup, schedule=schedule, min_lr=floor, decay_steps=end)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    more = {"scheduler_specific_kwargs": {"min_lr": floor}} if floor else {}
    scheduler = get_scheduler(peer, optimizer, num_warmup_steps=warmup, num_training_steps=50, **more)
    rates = []
    for _ in range(50):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert [learning_rate(options, step) for step in range(1, 51)] == pytest.approx(rates, abs=1e-12)


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule linear has no decay_steps"):
        learning_rate(Optimizer(lr=1.0, schedule="linear"), 1)


def topology_with(folder: Path, *overrides: str) -> Topology:
    file = edited(make(folder), "  kl:\n    coef: 0.001\n", "")
    return load(file, ["services.batch-store.memory=8MiB", *overrides])


def test_schedules_end_one_step_after_the_last_update_and_the_policy_starts_when_it_is_first_updated(
    tmp_path: Path,
) -> None:
    critic = "critic={optimizer: {lr: 2.0e-3, schedule: linear}, warmup_steps: 2}"
    policy, other = topology_with(
        tmp_path, "run.steps=10", "optimizer={lr: 1.0, schedule: linear}", "algorithm.advantage.name=gae", critic
    ).trained
    assert [learning_rate(policy.optimizer, step - policy.frozen_steps) for step in (2, 3, 10, 11)] == pytest.approx(
        [0.0, 8 / 9, 1 / 9, 0.0]
    )
    assert [learning_rate(other.optimizer, step) for step in (1, 10, 11)] == pytest.approx([20e-3 / 11, 2e-3 / 11, 0.0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{lr: 1.0, min_lr: 0.5}", "min_lr has no effect with schedule constant; remove it, or use linear or cosine"),
        ("{lr: 1.0, decay_steps: 5}", "decay_steps has no effect with schedule constant; remove it"),
        ("{lr: 1.0, schedule: linear, min_lr: 2.0}", r"min_lr 2 is above lr \(1\); use at most lr"),
        (
            "{lr: 1.0, schedule: cosine, warmup_steps: 9, decay_steps: 9}",
            r"decay_steps 9 is not above warmup_steps \(9\), which it includes; use more",
        ),
    ],
)
def test_options_of_a_schedule_that_contradict_each_other_are_refused(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=rf"optimizer: .*{message}"):
        topology_with(tmp_path, f"optimizer={given}")


def test_a_start_warns_about_updates_with_a_rate_of_0(tmp_path: Path) -> None:
    def warnings(*overrides: str) -> list[str]:
        findings = Findings("t.yaml")
        check_schedule(load(tmp_path / "t.yaml", ["run.steps=10", *overrides]), findings)
        return findings.warnings

    topology_with(tmp_path)
    assert warnings("optimizer={lr: 1.0, schedule: linear, decay_steps: 4}") == [
        "t.yaml: optimizer.decay_steps: 4 is below the 10 steps that update the policy, and the rest have a rate of 0; "
        "use 11, or set optimizer.min_lr"
    ]
    assert warnings("optimizer={lr: 1.0, schedule: linear, decay_steps: 4, min_lr: 0.1}") == []
    assert warnings("optimizer={lr: 1.0, schedule: cosine}") == []


def point(version: int, committed: int, waiting_rates: Mapping[str, float] = MappingProxyType({})) -> ResumePoint:
    return ResumePoint(version, committed, 0, -1, checkpoint_now=False, waiting_rates=waiting_rates)


def test_committed_rates_are_those_of_the_rows_with_an_update(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert committed_rates(metrics, point(0, 3)) == {}
    rows: list[dict[str, Any]] = [{"step": 0, "eval/a": 1.0}]
    rows += [{"step": 1, "policy/lr": 0.1 + 0.2}, {"step": 2, "policy/lr": 0.0}, {"step": 3, "policy/lr": 1e-5}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "poli')
    assert committed_rates(metrics, point(0, 3)) == {1: 0.1 + 0.2, 3: 1e-5}
    assert committed_rates(metrics, point(1, 3)) == {3: 1e-5}


def test_a_step_whose_row_waits_for_an_evaluation_also_repeats_its_rate(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "policy/lr": 0.125}\n')
    resumed = point(0, 3, {"2": 0.25})
    assert committed_rates(metrics, resumed) == {1: 0.125, 2: 0.25}
    assert committed_rates(metrics, point(2, 3, {"2": 0.25})) == {}


class Journal:
    """A scheduler whose step 3 is journaled but not committed, and the only worker, which has finished that step."""

    def __init__(self) -> None:
        self.committed: dict[int, dict[str, float]] = {}

    async def call(self, request: Request, reply: type[Message], *, deadline_s: float) -> Message:
        match request:
            case GetRunInfo():
                position = (3, 0) if self.committed else (2, 3)
                rates = {str(step): row["policy/lr"] for step, row in self.committed.items()}
                return RunInfo(
                    steps=5,
                    committed_step=position[0],
                    open_step=position[1],
                    lineage=0,
                    checkpoint_step=-1,
                    waiting_rates=rates,
                )
            case GetWorkerState():
                return WorkerState(step=3, driver=1, order=0, dirty=False)
            case NextBatch():
                return StepBatch(step=request.step, batch=BatchMeta(tasks=[]), scalars={})
            case CommitStep():
                self.committed[request.step] = request.metrics
        return Ack()


def test_a_step_that_workers_took_for_an_earlier_driver_is_committed_with_its_rate(tmp_path: Path) -> None:
    journal = Journal()
    client = cast(Client, journal)
    scheduler, workers = SchedulerCalls(client, 1), WorkerDispatch([client], Layout(1), 1)
    resumed = asyncio.run(resume(scheduler, workers, [], rate_of=lambda step: step / 8))
    assert (resumed.version, resumed.committed) == (3, 3)
    assert journal.committed[3]["policy/lr"] == 0.375
    later = dataclasses.replace(resumed, version=2)  # a later driver, whose workers were lost, replays the step
    assert committed_rates(tmp_path / "metrics.jsonl", later) == {3: 0.375}


def test_a_replayed_step_repeats_the_rate_of_its_commit_and_a_new_step_takes_that_of_the_topology(
    tmp_path: Path,
) -> None:
    topology = load(edited(make(tmp_path), "  kl:\n    coef: 0.001\n", ""), ["optimizer.lr=0.5"])
    nothing: Any = None
    driver = Driver(
        topology,
        nothing,
        nothing,
        nothing,
        point(1, 3),
        nothing,
        exports={},
        rates={2: 0.25},
    )
    assert [driver.numbers(POLICY, step).lr for step in (2, 3, 4)] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("value", [math.nan, -1e-9, math.inf])
@pytest.mark.parametrize("name", ["lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm"])
def test_a_worker_refuses_negative_and_non_finite_numbers_in_one_line(name: str, value: float) -> None:
    check_optimizer(adamw())
    with pytest.raises(
        RpcError, match=rf"^OptimStep\.optimizer\.{name} is {value}: it must be 0 or more and .*$"
    ) as caught:
        check_optimizer(structs.replace(adamw(), **{name: value}))
    assert caught.value.code == ErrorCode.BAD_REQUEST


def test_a_beta_of_1_is_refused() -> None:
    with pytest.raises(RpcError, match=r"beta1 is 1\.0: it must be 0 or more and below 1"):
        check_optimizer(structs.replace(adamw(), beta1=1.0))


def test_no_worker_reads_the_optimizer_the_sampling_or_the_algorithm_from_the_topology() -> None:
    files = sorted((ROOT / "services" / "policy_trainer" / "worker").rglob("*.py"))
    assert len(files) > 30
    for file in files:
        for section in ("optimizer", "sampling", "algorithm", "policy"):
            assert f"topology.{section}." not in file.read_text().replace("shared.topology.", ""), file
            assert f"model.{section}." not in file.read_text(), file
