"""Tests other parts of the backend contract for megatron, on ranks that are tensor- and data-parallel: bfloat16 with
float32 masters, resuming, moving memory, refusals and exports."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.megatron.backend import MegatronBackend
from services.policy_trainer.worker.training_state import TrainingState
from shared.colocation.devices import PARTS
from shared.megatron.cpu_shims import megatron_device
from shared.model.logprobs import Scores
from shared.ranks.layout import Layout, RankPlace
from shared.rpc.errors import RpcError
from tests.parity.gradient_cases import Case, back, cases
from tests.parity.groups import run_group
from tests.parity.megatron_models import every_next_token, megatron, plain_distributions, prefixes, save
from tests.parity.test_megatron_gradients import TRAINING
from tests.unit.policy_trainer.test_host_waits import Waits
from tests.unit.policy_trainer.training import adamw

pytestmark = pytest.mark.timeout(300)

FAMILY = "llama-untied"
CRITIC = "qwen3-critic"
MODELS = ((FAMILY, "float32"), (FAMILY, "bfloat16"), (CRITIC, "bfloat16"))


def same(left: TrainingState, right: TrainingState) -> bool:
    return all(
        one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        for one, two in ((left.weights, right.weights), (left.optimizer, right.optimizer))
    )


def train(backend: MegatronBackend, steps: range) -> None:
    batches = list(cases())
    for step in steps:
        back(backend, batches[step], backend._options.head)
        backend.step(step, adamw(step, **TRAINING))


def resumed_has_the_same_bits(model: Path, dtype: str, place: RankPlace, folder: Path) -> None:
    """Pass the state of rank 0 to all ranks through a file, as a checkpoint does."""
    backend = megatron(model, place, dtype=dtype)
    train(backend, range(1, 3))
    state = backend.state()
    if place.rank == 0:
        assert ("master/model.norm.weight" in state.optimizer) == (dtype == "bfloat16")
        assert state.weights["model.norm.weight"].dtype == getattr(torch, dtype)
        save_file(state.weights, folder / f"{model.name}-weights")
        save_file(state.optimizer, folder / f"{model.name}-optimizer")
    else:
        assert not state.weights
        assert not state.optimizer
    torch.distributed.barrier()
    other = megatron(model, place, dtype=dtype)
    written = (load_file(folder / f"{model.name}-{each}") for each in ("weights", "optimizer"))
    other.load_state(TrainingState(*written))
    assert same(other.state(), state)
    train(backend, range(3, 5))
    train(other, range(3, 5))
    assert same(other.state(), backend.state())
    other.restart()
    fresh = megatron(model, place, dtype=dtype)
    assert same(other.state(), fresh.state())


def moving_changes_no_bit(model: Path, place: RankPlace) -> None:
    still, moved = (megatron(model, place) for _ in range(2))
    batches: list[Case] = list(cases())
    for step in (1, 2):
        for backend in (still, moved):
            back(backend, batches[step])
        assert moved.shelves.offload(PARTS) > 0
        assert moved.shelves.offload(PARTS) == 0
        moved.shelves.backload(PARTS)
        assert moved.step(step, adamw(step, **TRAINING)) == still.step(step, adamw(step, **TRAINING))
    assert same(moved.state(), still.state())


def what_is_wrong_is_refused(model: Path, place: RankPlace) -> None:
    backend = megatron(model, place)
    train(backend, range(1, 2))
    before = backend.state()
    sequences = every_next_token()

    def broken(scores: Scores, _: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return scores.outputs.sum() * float("nan"), {}

    backend.forward_backward(sequences, 1.0, broken, entropy="none")
    with pytest.raises(RpcError, match="weights untouched: gradient norm is nan"):
        backend.step(2, adamw(2, **TRAINING))
    with pytest.raises(RpcError, match=r"weights of another model: model\.norm\.bias"):
        backend.load_state(
            TrainingState({**load_file(model / "model.safetensors"), "model.norm.bias": torch.zeros(1)}, {})
        )
    assert same(backend.state(), before)


def a_head_in_blocks_changes_nothing(model: Path, place: RankPlace, folder: Path) -> None:
    gradients = []
    for limit in (1 << 26, 200):
        with patch("shared.model.logprobs.MAX_LOGITS", limit), megatron_device():
            backend = megatron(model, place)
            with Waits() as waits:
                back(backend, next(cases()))
            assert "aten::nonzero" not in waits.seen
            backend._trained.reduce()
            gradients.append(backend._trained.gradients())
    whole, blocks = gradients
    for name, value in whole.items():
        np.testing.assert_allclose(blocks[name], value, rtol=1e-4, atol=1e-5)


def values_are_not_rounded(model: Path, place: RankPlace) -> None:
    critic = megatron(model, place, dtype="bfloat16")
    values = torch.from_numpy(critic.forward(every_next_token(), 1.0)[every_next_token().loss_mask == 1])
    assert values.unique().numel() == len(prefixes())
    assert not (values.bfloat16() == values).any()


def work(place: RankPlace, folder: Path) -> None:
    models = folder.parent / "models"
    for family, dtype in MODELS:
        resumed_has_the_same_bits(models / f"{family}-{dtype}", dtype, place, folder)
    values_are_not_rounded(models / f"{CRITIC}-bfloat16", place)
    model = models / f"{FAMILY}-float32"
    moving_changes_no_bit(model, place)
    what_is_wrong_is_refused(model, place)
    a_head_in_blocks_changes_nothing(model, place, folder)
    backend = megatron(model, place)
    train(backend, range(1, 3))
    backend.export(folder / "export")
    found = backend.forward(every_next_token(), 1.0)
    nothing = Sequences(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    assert backend.forward(nothing, 1.0).shape == (0,)
    np.save(folder / f"rank-{place.rank}" / "logprobs.npy", found[every_next_token().loss_mask == 1])
    assert backend.parameters == sum(each.numel() for each in load_file(model / "model.safetensors").values())


def test_megatron_resumes_moves_refuses_and_exports(tmp_path: Path) -> None:
    for family, dtype in MODELS:
        save(family, tmp_path / "models", dtype)
    run_group("tests.parity.test_megatron_backend:work", Layout(4, tp=2), tmp_path / "tp2xdp2")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "tp2xdp2" / "export").eval()
    assert exported.dtype == torch.float32
    expected = plain_distributions(exported, 1.0)
    untrained = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / f"{FAMILY}-float32").eval()
    assert np.abs(plain_distributions(untrained, 1.0) - expected).max() > 1e-3
    for rank in range(4):
        found = np.load(tmp_path / "tp2xdp2" / f"rank-{rank}" / "logprobs.npy")
        assert np.abs(found - expected).max() <= 1e-5
