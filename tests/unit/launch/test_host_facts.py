"""Tests the requirements for a host that takes part in a run: versions, clocks, and resources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from launch.placement.facts import CLOCK_LIMIT_S, clock_ahead, code_digest, refusals
from proto.messages import HostFacts
from shared.topology import Topology, load
from tests.unit.shared.topology.small_topology import make, write

ROOT = Path(__file__).resolve().parents[3]
HOME = HostFacts(
    name="a", code="1", python="3.11.7", torch="2.13.0", gpus=0, niceness=0, free_bytes=1 << 40, problems=[]
)


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """A topology that gives two GPUs to host b."""
    hosts = ["placement.hosts={b: {gpus: 2}}", "transport.listen=10.0.0.1"]
    return load(write(make(tmp_path_factory.mktemp("hosts"))), hosts)


def test_identical_hosts_and_hosts_with_a_different_patch_release_of_python_are_accepted(topology: Topology) -> None:
    there = msgspec.structs.replace(HOME, name="b", python="3.11.9", gpus=8)
    assert refusals(topology, HOME, "b", there) == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("code", "2", "a different rlbus (code 2, here 1); install the same release on both"),
        ("python", "3.12.7", "Python 3.12.7, here 3.11.7; use the same on both"),
        ("torch", "2.12.0", "torch 2.12.0, here 2.13.0; install the same on both"),
        ("torch", "", "torch missing, here 2.13.0; install the same on both"),
        ("problems", ["policy.model: no folder /m"], "policy.model: no folder /m"),
        (
            "gpus",
            1,
            "its agent may use 1 GPUs, but placement.hosts gives it 2; lower that, or check its CUDA_VISIBLE_DEVICES",
        ),
        ("clock_s", -3.0, "its clock is 3.0 s behind home's (limit 2 s); synchronise them (chrony, ntp)"),
        ("clock_s", 4.5, "its clock is 4.5 s ahead of home's (limit 2 s); synchronise them (chrony, ntp)"),
    ],
)
def test_a_host_that_differs_is_refused_with_a_one_line_error(
    topology: Topology, key: str, value: object, line: str
) -> None:
    there = msgspec.structs.replace(HOME, **{"gpus": 2, key: value})
    assert refusals(topology, HOME, "b", there) == [line]


@pytest.mark.parametrize(
    ("there_at", "ahead"),
    [
        (100.0, 0.0),
        (105.0, 0.0),  # The round trip took 5 s, so the clock may be right.
        (97.0, -3.0),
        (109.5, 4.5),
    ],
)
def test_a_clock_counts_as_wrong_only_as_far_as_the_round_trip_cannot_explain_the_difference(
    topology: Topology, there_at: float, ahead: float
) -> None:
    assert clock_ahead(100.0, there_at, 105.0) == ahead
    limit = msgspec.structs.replace(HOME, gpus=2, clock_s=CLOCK_LIMIT_S)
    assert refusals(topology, HOME, "b", limit) == []


@pytest.mark.slow
def test_a_host_checks_itself_against_a_resolved_topology_and_names_missing_resources(tmp_path: Path) -> None:
    topology = load(write(make(tmp_path)))
    text = topology.to_yaml()
    there = _checked(text)
    assert there.code == code_digest()
    lacks = _checked(text.replace(str(tmp_path / "model"), str(tmp_path / "elsewhere")))
    assert [line for line in lacks.problems if line.startswith(f"policy.model: no folder {tmp_path}/elsewhere")]
    assert not [line for line in there.problems if "elsewhere" in line]


def test_a_host_that_copies_the_model_and_the_data_from_home_needs_only_space_for_them(tmp_path: Path) -> None:
    hosts = ["placement.hosts={b: {}}", "transport.listen=10.0.0.1", "policy.distribute=true"]
    topology = load(write(make(tmp_path)), hosts)
    there = _checked(topology.to_yaml().replace(str(tmp_path), "/elsewhere"))
    assert there.problems == []
    needed = sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert refusals(topology, there, "b", msgspec.structs.replace(there, free_bytes=2 * needed)) == []
    [line] = refusals(topology, there, "b", msgspec.structs.replace(there, free_bytes=needed // 2))
    assert line.startswith("policy.distribute: ")
    assert line.endswith("make room there")


def _checked(topology: str) -> HostFacts:
    command = [sys.executable, "-m", "launch.host", "--check"]
    done = subprocess.run(command, input=topology, capture_output=True, text=True, cwd=ROOT, check=True)
    return HostFacts(**msgspec.json.decode(done.stdout))
