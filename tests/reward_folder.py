"""Makes folders of reward models for tests: the quickstart's model with a value head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TINY = Path(__file__).resolve().parents[1] / "launch" / "topologies" / "models" / "tiny-qwen3"


def reward_folder(folder: Path, *, labels: int = 1, seed: int = 0) -> Path:
    """Write a sequence classifier with random weights in its head into `folder`, and return it."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_labels": labels}))
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    head = np.random.default_rng(seed).normal(0, 0.3, (labels, hidden)).astype(np.float32)
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder
