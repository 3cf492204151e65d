"""Tests `services.rollout.weights` and `transfer_s`: routes between a trainer and an engine, and one-line refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.topology import load, service_checks
from shared.topology.service_checks import transfer_floor_s
from tests.unit.shared.topology.small_topology import problems, write

ON_GPUS = [
    "services.rollout.engine=vllm",
    "services.rollout.instances=1",
    "services.rollout.gpus=1",
    "services.policy-trainer.gpus=1",
]
TOGETHER = ["staleness=0", "placement.colocate=[policy-trainer, rollout]"]


def route(name: str) -> str:
    return f"services.rollout.weights={name}"


def test_weights_are_shards_by_default(folder: Path) -> None:
    rollout = load(write(folder)).services.rollout
    assert (rollout.weights, rollout.transfer_s) == ("shards", None)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_time_limit_of_gloo_transfers_is_shorter_than_a_lease(folder: Path, engine: str) -> None:
    rollout = load(write(folder), [route("gloo"), f"services.rollout.engine={engine}", "lease.lease_s=45"])
    assert rollout.services.rollout.transfer_s == pytest.approx(30)


def test_nccl_and_ipc_need_vllm_on_gpus(folder: Path) -> None:
    assert load(write(folder), [route("nccl"), *ON_GPUS]).services.rollout.weights == "nccl"
    assert load(write(folder), [route("ipc"), *ON_GPUS, *TOGETHER]).services.rollout.weights == "ipc"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([route("gloo"), "services.rollout.gpus=1"], "gloo is for engines on a CPU, but this one has 1 GPUs"),
        ([route("gloo"), "services.rollout.engine=openai"], "engine openai receives weights as a file; use shards"),
        ([route("nccl"), "services.rollout.gpus=1", "services.policy-trainer.gpus=1"], "engine transformers lacks"),
        ([route("nccl"), "services.rollout.engine=vllm"], "nccl needs GPUs for policy-trainer (0) and rollout (0)"),
        ([route("nccl"), *ON_GPUS, *TOGETHER], "nccl allows one process per GPU"),
        ([route("ipc"), *ON_GPUS], "ipc needs policy-trainer and rollout on the same GPUs"),
        (
            [route("ipc"), *ON_GPUS, *TOGETHER, "services.policy-trainer.gpus=2", "services.rollout.instances=2"],
            "ipc reaches one engine on the one GPU of the trainer, not 2 on 2 GPUs; use shards",
        ),
    ],
)
def test_an_unsupported_route_is_refused(folder: Path, overrides: list[str], why: str) -> None:
    lines = problems(write(folder), *overrides)
    assert [line for line in lines if "services.rollout.weights: " in line and why in line], lines


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["services.rollout.transfer_s=5"], "5 has no effect with weights: shards, which are not sent; remove it"),
        ([route("gloo"), "services.rollout.transfer_s=30"], "30 is not less than lease.lease_s (30)"),
    ],
)
def test_a_time_limit_without_effect_is_refused(folder: Path, overrides: list[str], why: str) -> None:
    lines = problems(write(folder), *overrides)
    assert [line for line in lines if "services.rollout.transfer_s: " in line and why in line], lines


def test_a_time_limit_too_short_to_send_a_version_is_refused_with_a_sufficient_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [route("nccl"), *ON_GPUS, "services.rollout.instances=4", "services.rollout.gpus=1"]
    monkeypatch.setattr(service_checks, "weight_bytes", lambda model: 15_231_233_024)
    [line] = problems(write(folder), *chosen)
    assert "services.rollout.transfer_s: 20 is too short for 15.2 GB to 4 engines by nccl at 2 GB/s" in line
    assert "set at least 31, and lease.lease_s to at least 46" in line
    assert load(write(folder), [*chosen, "lease.lease_s=46.5"]).services.rollout.transfer_s == pytest.approx(31)


def test_the_minimum_time_for_a_transfer_grows_with_bytes_and_engines() -> None:
    assert transfer_floor_s("nccl", 2_000_000_000, 1) == pytest.approx(1)
    assert transfer_floor_s("nccl", 2_000_000_000, 4) == pytest.approx(4)
    assert transfer_floor_s("gloo", 2_000_000_000, 1) > transfer_floor_s("nccl", 2_000_000_000, 1)
