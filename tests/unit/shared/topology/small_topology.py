"""Provides a small topology for tests, and the errors that `load` reports for edited copies of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.topology import TopologyError, load

WEIGHTS = 1000

# Line numbers in the tests below refer to lines in this text, counted from 1.
BASE = """\
run: {name: small, steps: 3}
policy:
  model: ./model
  dtype: bfloat16
data:
  train: {source: "jsonl:rows.jsonl", max_prompt_tokens: 32}
  eval:
    held: {source: "builtin:addition?split=test", every: 5}
reward: {function: "builtin:exact_match"}
sampling:
  temperature: 1.0
  max_new_tokens: 8
algorithm:
  tasks_per_step: 6
  group_size: 4
  loss: {aggregation: token_mean}
  kl:
    coef: 0.001
optimizer:
  lr: 1e-3
services:
  policy-trainer:
    backend: torch
  rollout:
    instances: 2
  batch-store:
    memory: 1MiB
"""


def make(folder: Path) -> Path:
    """Create, in `folder`, the files that BASE names: a model with WEIGHTS parameters and a data set with one row."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    save_file({"w": np.zeros((10, WEIGHTS // 10), np.float32)}, model / "model.safetensors")
    (model / "tokenizer.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return folder


def write(folder: Path, text: str = BASE) -> Path:
    path = folder / "t.yaml"
    path.write_text(text)
    return path


def edited(folder: Path, old: str, new: str) -> Path:
    assert BASE.count(old) == 1
    return write(folder, BASE.replace(old, new))


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        load(path, list(overrides))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    return [line.removeprefix(f"{path.parent}/") for line in lines]
