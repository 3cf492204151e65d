"""What is offloaded really leaves memory, and comes back bit for bit into the same tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from proto.messages import LossSpec
from services.policy_trainer.worker.residency import PARTS
from shared.topology.algorithm import Optimizer
from tests.unit.tiny_models import make_model, ragged
from tests.unit.training import accumulate, one_rank

LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_falls_by_what_was_offloaded_and_the_next_update_is_the_same(tmp_path: Path, dtype: str) -> None:
    make_model("qwen3", head_dim=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=6).save_pretrained(
        tmp_path / "model"
    )
    ids, lengths, mask = ragged()
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "versions": np.zeros(len(ids), np.int32),
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
    }
    advantages = np.random.default_rng(0).normal(size=len(ids)).astype(np.float32)
    weights = np.full(len(ids), 1 / mask.sum(), np.float32)
    found = []
    for moves in (False, True):
        made = one_rank(tmp_path / "model", dtype, Optimizer(lr=1e-2), max_tokens=4096)
        accumulate(made, LOSS, flat, advantages, weights)
        made.step(1)
        lent = made.weights()["model.norm.weight"].float().numpy()  # as publishing lends weights to numpy
        accumulate(made, LOSS, flat, advantages, weights)
        if moves:
            process = psutil.Process()
            before = process.memory_info().rss
            freed = made.offload(PARTS)
            fallen = before - process.memory_info().rss
            assert freed > 20e6
            assert fallen >= 0.8 * freed
            assert made.backload(PARTS) == freed
            assert not list((tmp_path / "model").rglob("*.bin"))
        made.step(2)
        assert np.isfinite(lent).all()
        found.append(made.state())
    for kind in ("weights", "optimizer"):
        first, second = (getattr(each, kind) for each in found)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
