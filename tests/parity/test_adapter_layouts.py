"""Tests that the checkpoint of an adapter moves between one rank and two, and that two ranks export what one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.calls.weights import export, merging_error
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.training_state import TrainingState
from services.policy_trainer.worker.weights.publish import Canaries
from shared.model.adapter import AdapterStart
from shared.ranks.layout import Layout, RankPlace
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from tests.parity.groups import run_group
from tests.unit.policy_trainer.test_state import train
from tests.unit.tiny_models import make_model

START = AdapterStart(Lora(rank=4, alpha=7.0), seed=3)
DTYPES = ("float32", "bfloat16")


def adapted(model: Path, dtype: str, place: RankPlace, scratch: Path) -> TorchBackend:
    options = BackendOptions(4096, threads=1, device="cpu", scratch=scratch, passes=FASTEST, adapter=START)
    return TorchBackend(model, dtype, options, place)


def load(made: TorchBackend, folder: Path, step: int) -> None:
    saved = checkpoint.load(folder, step)
    made.load_state(TrainingState(saved.weights, saved.optimizer))


def save(made: TorchBackend, folder: Path, step: int) -> None:
    state = made.state()
    if made.place.rank == 0:
        checkpoint.save(folder, SavedState(step, state.weights, state.optimizer))


def error_of(made: TorchBackend, dtype: str) -> float:
    return merging_error(made, Canaries(made, made._source, dtype, 3, with_digests=False))


def work(place: RankPlace, folder: Path) -> None:
    """Continue from a checkpoint of one rank: save it again, export it, train a step and save that."""
    for dtype in DTYPES:
        own = folder.parent / dtype
        made = adapted(own / "model", dtype, place, folder / "scratch")
        load(made, own / "one", 2)
        save(made, own / "two", 2)
        export(made, own / "model", own / "export-of-two")
        error = error_of(made, dtype)
        train(made, 3, share=1.0 if place.rank == 0 else 0.0)
        save(made, own / "two", 3)
        if place.rank == 0:
            (own / "error.json").write_text(json.dumps(error))


def test_the_checkpoint_of_an_adapter_moves_from_one_rank_to_two_and_back(tmp_path: Path) -> None:
    alone = {}
    for dtype in DTYPES:
        own = tmp_path / dtype
        make_model("qwen3", head_dim=12, tie_word_embeddings=True).save_pretrained(own / "model")
        alone[dtype] = adapted(own / "model", dtype, Layout(1).place(0), own / "scratch")
        for step in (1, 2):
            train(alone[dtype], step)
        save(alone[dtype], own / "one", 2)
    run_group(f"{__name__}:work", Layout(2), tmp_path / "ranks")
    for dtype, made in alone.items():
        own = tmp_path / dtype
        for file in ("model.safetensors", "optimizer.safetensors"):
            one, two = (load_file(own / side / "step-2" / file) for side in ("one", "two"))
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
        export(made, own / "model", own / "export")
        for file in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
            assert (own / "export" / file).read_bytes() == (own / "export-of-two" / file).read_bytes()
        error = error_of(made, dtype)
        assert json.loads((own / "error.json").read_text()) == pytest.approx(error, rel=0.5, abs=1e-4)
        assert (error > 1e-3) == (dtype == "bfloat16")
        train(made, 3)
        here = made.state()
        load(made, own / "two", 3)
        there = made.state()
        assert here.optimizer.keys() == there.optimizer.keys()
        for name, moment in here.optimizer.items():
            limit = 1e-5 if dtype == "float32" else 0.05
            assert torch.allclose(moment, there.optimizer[name], rtol=limit, atol=limit * float(moment.abs().max()))
