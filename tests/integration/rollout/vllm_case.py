"""Uses transformers to compute the values with which a vLLM engine's answers about a model are compared.

This module never imports vLLM, and asserts nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from proto.tensors import Array
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy, to_torch
from shared.weights.drill import canary_tokens, perturb
from tests.integration.rollout.vllm_process import HOT, SEED

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "launch" / "topologies" / "models" / "tiny-qwen3"
STOP = "1"
REFUSED = {
    "misspelled": {"max_num_seq": 8},
    "ours": {"logprobs_mode": "raw_logprobs"},
    "elsewhere": {"tensor_parallel_size": 2},
    "too_small": {"kv_cache_memory_bytes": 4096},
}


class Case:
    """A model, the engine's answers about it, and the model's versions in transformers."""

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
        """Return the log-probs of `sequence` (token ids, lengths, mask), computed by transformers."""
        with torch.no_grad():
            return to_numpy(token_logprobs(self.loaded(weights), *sequence, temperature, 4096)[0]).copy()

    def loaded(self, weights: dict[str, Array]) -> Any:
        """Return the model with `weights` loaded."""
        model = load_model(self.model, "float32").eval()
        with torch.no_grad():
            for name, parameter in named_weights(model).items():
                parameter.copy_(to_torch(weights[name]))
        return model

    def error(self, name: str, step: int, temperature: float) -> float:
        """Return the largest difference between the log-probs in answer `name` and transformers' at version `step`."""
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

    def midway_errors(self, name: str) -> dict[str, float]:
        """Return the largest log-prob differences in answer `name`, whose samples began under version 1 and ended under
        version 2.

        `before` compares the tokens of version 1 with version 1. For the later tokens, `recomputed` compares with
        version 2 alone, and `kept` with version 2 over version 1's keys and values for the tokens that version 1 had
        read.
        """
        old, new = self.loaded(self.version(1)), self.loaded(self.version(2))
        errors = dict.fromkeys(("before", "recomputed", "kept"), 0.0)
        for prompt, group in zip(self.prompts, self.answer[name], strict=True):
            for each in group:
                swaps = np.array(each["swaps"]) - self.answer[f"{name}_began"]
                switch = len(prompt) + int((swaps == 0).sum())
                ids = torch.tensor([prompt + each["ids"]])
                with torch.no_grad():
                    read = old(ids[:, : switch - 1], use_cache=True)
                    after = new(ids[:, switch - 1 :], past_key_values=read.past_key_values).logits
                    alone = new(ids).logits[:, switch - 1 :]
                ours = np.array(each["logprobs"])
                for what, logits, targets, said in (
                    ("before", read.logits[:, len(prompt) - 1 :], ids[0, len(prompt) : switch - 1], ours),
                    ("kept", after, ids[0, switch:], ours[swaps == 1]),
                    ("recomputed", alone, ids[0, switch:], ours[swaps == 1]),
                ):
                    theirs = (logits[0] / HOT).log_softmax(-1)[range(len(targets)), targets].numpy()
                    errors[what] = max([errors[what], *np.abs(theirs - said[: len(theirs)])])
        return errors

    def run(self, folder: Path, module: str = "tests.integration.rollout.vllm_process") -> None:
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
        command = [sys.executable, "-m", module, str(self.model)]
        done = subprocess.run(
            [*command, str(folder / "case.json"), str(folder / "answer.json")],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=350,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.answer = json.loads((folder / "answer.json").read_text())
