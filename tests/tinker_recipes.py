"""The cookbook's recipes on a tiny model and tiny data sets, without a network: names of models and data sets that are
folders below the working directory are these folders.

The model answers every question with `\\boxed{d}`, a random digit d from 1 to 4, and then either starts the next turn
or ends the text. The answers to all questions are such digits, so the recipes that sample see different rewards within
a group and take real updates.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
MODEL = "Qwen/Qwen3-8B-Base"
TINY = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
_SHARED = (f"model_name={MODEL}",)
RECIPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sl_loop": (
            "tinker_cookbook.recipes.sl_loop",
            *_SHARED,
            "batch_size=2",
            "max_length=48",
            "learning_rate=1e-3",
            "save_every=2",
        ),
        "rl_loop": (
            "tinker_cookbook.recipes.rl_loop",
            *_SHARED,
            "batch_size=2",
            "group_size=6",
            "max_tokens=8",
            "max_steps=6",
            "learning_rate=1e-3",
            "loss_fn=importance_sampling",
        ),
        "math_rl": (
            "tinker_cookbook.recipes.math_rl.train",
            *_SHARED,
            "env=arithmetic",
            "group_size=4",
            "groups_per_batch=2",
            "max_tokens=8",
            "max_steps=6",
            "learning_rate=1e-3",
            "loss_fn=importance_sampling",
        ),
    }
)
"""The module and the arguments of each recipe."""
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "saw", "two", "dogs", "that", "ran")


def prepare(folder: Path, rows: int = 6) -> None:
    """Write the model and the data sets that the recipes name into `folder`."""
    numbers = random.Random(0)
    boxing_model(folder / MODEL)
    sentences = folder / "HuggingFaceH4" / "no_robots" / "train.jsonl"
    sums = folder / "openai" / "gsm8k"
    sentences.parent.mkdir(parents=True)
    sums.mkdir(parents=True)
    (sums / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    with sentences.open("w") as file:
        for _ in range(rows):
            asked, said = (" ".join(numbers.choices(_WORDS, k=4)) for _ in range(2))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"prompt": asked, "messages": messages, "category": "none"}) + "\n")
    with (sums / "train.jsonl").open("w") as file:
        for _ in range(rows):
            one, other = numbers.randint(1, 2), numbers.randint(0, 2)
            file.write(json.dumps({"question": f"{one}+{other}=", "answer": f"#### {one + other}"}) + "\n")


def boxing_model(folder: Path, steps: int = 40) -> None:
    """Write the model: the quickstart's, whose tokens for `'`, `"` and `$` mean `\\boxed{`, `}` and `User` instead."""
    shutil.copytree(TINY, folder)
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    tokens = document["model"]["vocab"]
    for old, new in (("'", "\\boxed{"), ('"', "}"), ("$", "User")):
        tokens[new] = tokens.pop(old)
    file.write_text(json.dumps(document))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    numbers = random.Random(1)
    torch.manual_seed(0)
    ends = (["\n", "\n", "User", ":"], ["<eos>", "<pad>", "<pad>", "<pad>"])
    answers = [[" ", "\\boxed{", digit, "}", *end] for digit in "1234" for end in ends]
    for _ in range(steps):
        question = "".join(numbers.choices("0123456789+= abcdefghijk", k=numbers.randint(20, 380)))
        asked = tokenizer.encode(f"User: {question}\n\nAssistant:")
        batch = torch.tensor([[*asked, *(tokens[text] for text in answer)] for answer in answers])
        labels = batch.masked_fill(batch == tokens["<pad>"], -100)
        labels[:, : len(asked)] = -100
        model(input_ids=batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
