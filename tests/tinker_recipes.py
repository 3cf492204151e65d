"""The cookbook's recipes on a tiny model and tiny data sets, without a network: names of models and data sets that are
folders below the working directory are these folders."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

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
            "group_size=2",
            "max_tokens=4",
            "max_steps=2",
            "loss_fn=importance_sampling",
        ),
        "math_rl": (
            "tinker_cookbook.recipes.math_rl.train",
            *_SHARED,
            "env=arithmetic",
            "group_size=2",
            "groups_per_batch=2",
            "max_tokens=4",
            "max_steps=2",
            "loss_fn=importance_sampling",
        ),
    }
)
"""The module and the arguments of each recipe."""
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "saw", "two", "dogs", "that", "ran")


def prepare(folder: Path, rows: int = 6) -> None:
    """Write the model and the data sets that the recipes name into `folder`."""
    numbers = random.Random(0)
    shutil.copytree(TINY, folder / MODEL)
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
            one, other = numbers.randint(1, 9), numbers.randint(1, 9)
            file.write(json.dumps({"question": f"{one}+{other}=", "answer": f"#### {one + other}"}) + "\n")
