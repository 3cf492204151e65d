"""Tests how many instances a run can have, which resources they need, and which number is written into the topology. No
process is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.processes.plan import Resources
from launch.supervisor import requests
from launch.supervisor.requests import THREADS_PER_CPU, resize
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.topology import load

QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
CPUS = len(os.sched_getaffinity(0))
Make = Callable[..., RunDir]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(*overrides: str, topology: Path = QUICKSTART) -> RunDir:
        path = tmp_path / "run"
        path.mkdir()
        run = RunDir(path=path, sockets=tmp_path / "sockets", shm=tmp_path / "shm")
        load(topology, list(overrides)).dump_resolved(run.topology)
        return run

    return made


def test_number_of_rollouts_is_written_into_the_topology_of_the_run(make: Make) -> None:
    run = make("services.rollout.threads=1")
    block = load(run.topology).services.rollout.block_tasks
    resized = resize(run.topology, "rollout", 2)
    assert [*resized] == [("rollout", 0), ("rollout", 1)]
    assert set(resized.values()) == {Resources(1, "")}
    after = load(run.topology).services.rollout
    assert (after.instances, after.block_tasks) == (2, block)
    assert [*resize(run.topology, "rollout", 1)] == [("rollout", 0)]
    assert load(run.topology).services.rollout.instances == 1


def test_references_on_cpus_are_scaled_without_a_change_to_the_topology(make: Make) -> None:
    run = make()
    before = run.topology.read_text()
    assert [*resize(run.topology, "reference", 2)] == [("reference", 0), ("reference", 1)]
    assert run.topology.read_text() == before


@pytest.mark.parametrize(
    ("overrides", "service", "instances", "why"),
    [
        (["run.deterministic=true"], "rollout", 2, "run.deterministic fixes the plan"),
        (["staleness=0", "placement.colocate=[rollout, policy-trainer]"], "rollout", 2, "placement.colocate"),
        (
            ["services.reference.backend=megatron", "services.reference.parallel.tp=2"],
            *("reference", 3, "use a multiple of 2, at least 2"),
        ),
        (["algorithm.kl=null", "services.reference=null"], "reference", 2, "only rollout can"),
        (["services.rollout.threads=2"], "rollout", 1000, f"use {THREADS_PER_CPU * CPUS // 2} or fewer"),
        (["services.batch-store.memory=14700000"], "rollout", 4, "services.batch-store.memory"),
        ([], "batch-store", 2, "batch-store cannot be scaled"),
        ([], "rollout", -1, "use 1 or more"),
    ],
)
def test_a_refusal_gives_one_line_and_writes_nothing(
    make: Make, overrides: list[str], service: str, instances: int, why: str
) -> None:
    run = make(*overrides)
    before = run.topology.read_text()
    with pytest.raises(RpcError) as refused:
        resize(run.topology, service, instances)
    assert why in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert run.topology.read_text() == before


def test_too_many_gpus_are_refused_with_both_numbers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "own_gpus", lambda: ["0", "1", "2"])
    run = make("services.rollout.gpus=1")
    assert [each.gpus for each in resize(run.topology, "rollout", 3).values()] == ["0", "1", "2"]
    with pytest.raises(RpcError, match=r"4 GPUs wanted \(rollout 4\), but there are 3"):
        resize(run.topology, "rollout", 4)
    assert load(run.topology).services.rollout.instances == 3


def test_ranks_of_one_model_are_counted_for_each_service(make: Make) -> None:
    run = make("services.policy-trainer.workers=2")
    assert load(run.topology).ranks == {"policy-trainer-worker": 2, "reference": 1}
