"""Tests the arguments that vLLM gets from a topology. vLLM itself is not imported."""

from __future__ import annotations

import os

import pytest

from services.rollout.engines.vllm_setup import InFlight, arguments_of, prepare_process, seed_of
from shared.rpc.errors import RpcError

KNOWN = {"async_scheduling", "enforce_eager", "max_num_seqs", "quantization", "quantization_config"}


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_no_step_is_computed_ahead_if_weights_change_while_samples_run(in_flight: InFlight) -> None:
    assert arguments_of({}, KNOWN, on_cpu=False, in_flight=in_flight)["async_scheduling"] is False
    with pytest.raises(
        RpcError, match=f"async_scheduling: cannot be true with services.rollout.in_flight: {in_flight}"
    ):
        arguments_of({"async_scheduling": True}, KNOWN, on_cpu=False, in_flight=in_flight)


def test_steps_are_scheduled_as_vllm_or_the_user_decides_if_weights_change_only_between_blocks() -> None:
    assert "async_scheduling" not in arguments_of({}, KNOWN, on_cpu=False, in_flight="wait")
    assert arguments_of({"async_scheduling": True}, KNOWN, on_cpu=False, in_flight="wait")["async_scheduling"] is True


def test_vllm_runs_models_with_the_tested_settings_unless_the_user_sets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_process(1)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setattr(os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    prepare_process(1)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_cuda_graphs_are_vllms_default_on_a_gpu_and_the_user_can_switch_them_off() -> None:
    assert "enforce_eager" not in arguments_of({}, KNOWN, on_cpu=False, in_flight="wait")
    assert arguments_of({"enforce_eager": True}, KNOWN, on_cpu=False, in_flight="wait")["enforce_eager"] is True
    assert arguments_of({}, KNOWN, on_cpu=True, in_flight="wait")["enforce_eager"] is True


def test_experts_on_gpus_have_the_layout_that_a_proof_can_read_unless_the_user_sets_another() -> None:
    assert arguments_of({}, KNOWN, on_cpu=False, in_flight="wait")["moe_backend"] == "triton"
    assert "moe_backend" not in arguments_of({}, KNOWN, on_cpu=True, in_flight="wait")
    own = arguments_of({"moe_backend": "auto"}, {*KNOWN, "moe_backend"}, on_cpu=False, in_flight="wait")
    assert own["moe_backend"] == "auto"


def test_engines_on_gpus_draw_different_numbers_and_requests_there_have_no_seeds() -> None:
    seeds = {arguments_of({}, KNOWN, on_cpu=False, in_flight="wait")["seed"] for _ in range(4)}
    assert len(seeds) > 1
    assert max(seeds) < 1 << 31
    assert arguments_of({"seed": 7}, {*KNOWN, "seed"}, on_cpu=False, in_flight="wait")["seed"] == 7
    assert "seed" not in arguments_of({}, KNOWN, on_cpu=True, in_flight="wait")
    assert seed_of("train/0/1", 1, own=False) is None
    on_cpu = [seed_of(name, seed, own=True) for name, seed in [("a", 1), ("a", 1), ("a", 2), ("b", 1)]]
    assert len(set(on_cpu)) == 3
    assert on_cpu[0] == on_cpu[1]


@pytest.mark.parametrize(
    "given", [{"quantization": "fp8"}, {"quantization_config": {"linear": {"weight": "fp8"}}}], ids=str
)
def test_quantised_weights_which_cannot_be_proved_bit_by_bit_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(RpcError, match=f"engine_args.{next(iter(given))}: cannot be set here because it decides what"):
        arguments_of(given, KNOWN, on_cpu=False, in_flight="wait")
