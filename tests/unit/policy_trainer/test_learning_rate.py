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
from msgspec import structs

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
from services.policy_trainer.update import optimizer_numbers
from services.policy_trainer.worker.calls.training import check_optimizer
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.topology import load
from shared.topology.algorithm import Optimizer
from shared.topology.models import POLICY
from tests.unit.policy_trainer.training import adamw
from tests.unit.shared.topology.small_topology import edited, make

ROOT = Path(__file__).resolve().parents[3]


def test_warm_up_is_linear_and_then_constant() -> None:
    options = Optimizer(lr=1e-2, warmup_steps=4)
    rates = [optimizer_numbers(options, step).lr for step in (1, 2, 4, 9)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 1e-2, 1e-2])


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
