"""Which GPUs a process sees: its own, or the same as those it takes turns with."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.gpus import visible_gpus
from shared.topology import Topology, load
from tests.unit.small_topology import BASE, make, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


def topology(folder: Path, *overrides: str) -> Topology:
    gpus = ["services.policy-trainer.gpus=4", "services.reference.gpus=4", "services.rollout.gpus=2"]
    return load(write(folder, BASE), [*gpus, *overrides], check_supported=False)


def test_services_that_share_nothing_see_gpus_of_their_own(folder: Path) -> None:
    seen = visible_gpus(topology(folder, "services.reference.parallel.tp=2"))
    assert {seen["policy-trainer-worker", rank] for rank in range(4)} == {"0,1,2,3"}
    assert [seen["reference", i] for i in range(2)] == ["4,5", "6,7"]
    assert [seen["rollout", i] for i in range(2)] == ["8,9", "10,11"]
    assert ("policy-trainer", 0) not in seen


def test_colocated_services_see_the_same_gpus_and_engines_divide_them(folder: Path) -> None:
    seen = visible_gpus(topology(folder, "placement.colocate=[policy-trainer, reference, rollout]", "staleness=0"))
    assert {seen["policy-trainer-worker", rank] for rank in range(4)} == {"0,1,2,3"}
    assert [seen["reference", i] for i in range(4)] == ["0", "1", "2", "3"]
    assert [seen["rollout", i] for i in range(2)] == ["0,1", "2,3"]


def test_what_is_handed_out_is_a_part_of_what_the_launcher_sees(folder: Path) -> None:
    seen = visible_gpus(topology(folder, "placement.colocate=[policy-trainer, reference]"), "7,6,5,4,3,2,1,0")
    assert seen["policy-trainer-worker", 3] == "7,6,5,4"
    assert seen["reference", 1] == "6"
    assert [seen["rollout", i] for i in range(2)] == ["3,2", "1,0"]


def test_a_run_on_the_cpu_hides_nothing(folder: Path) -> None:
    assert visible_gpus(load(write(folder), check_supported=False)) == {}
