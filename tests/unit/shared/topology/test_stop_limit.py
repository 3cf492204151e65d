"""Tests how long a trainer that is told to stop may save its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.topology import load, stop_limit_s
from tests.unit.shared.topology.small_topology import write

MIB = 1 << 20


def test_a_trainer_has_a_minute_and_a_second_for_each_32_mib_of_its_checkpoint(folder: Path) -> None:
    """A checkpoint has the weights and Adam's two moments in float32; in a deterministic run with a staleness of 1 it
    has the weights of the version before, too."""
    save_file({"w": np.zeros((64, MIB // 4), np.float32)}, folder / "model" / "model.safetensors")  # 64 MiB
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    room = "services.batch-store.memory=2GiB"
    assert stop_limit_s(load(write(folder), [room])) == pytest.approx(60 + 3 * 64 / 32, rel=0.01)
    deterministic = load(write(folder), [room, "run.deterministic=true", "staleness=1"])
    assert stop_limit_s(deterministic) == pytest.approx(60 + 4 * 64 / 32, rel=0.01)


def test_the_checkpoints_of_all_trained_models_are_written_to_one_disk(folder: Path) -> None:
    """A critic publishes nothing, so it has no version before, either."""
    save_file({"w": np.zeros((64, MIB // 4), np.float32)}, folder / "model" / "model.safetensors")
    ppo = ["critic={optimizer: {lr: 1.0e-3}}", "algorithm.advantage={name: gae}", "services.batch-store.memory=2GiB"]
    assert stop_limit_s(load(write(folder), ppo)) == pytest.approx(60 + 2 * 3 * 64 / 32, rel=0.01)
    deterministic = load(write(folder), [*ppo, "run.deterministic=true", "staleness=1"])
    assert stop_limit_s(deterministic) == pytest.approx(60 + (4 + 3) * 64 / 32, rel=0.01)
