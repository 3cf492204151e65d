"""Tests that the trainer, the reference and the embedded engine give the same results on a CUDA device as on the CPU
and can free the device's memory.

Other tests verify the results on the CPU.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from services.reference.frozen import FrozenTorch
from services.reference.scorer import FrozenScorer
from services.rollout.engine import Prompt
from services.rollout.engines.transformers_engine import TransformersEngine
from shared.colocation.devices import ENGINE, PARTS, WEIGHTS
from shared.ranks.layout import Layout, RankPlace
from shared.topology.passes import FASTEST
from tests.parity.groups import run_group
from tests.unit.policy_trainer.training import adamw
from tests.unit.rollout.rollout_engine import sampling
from tests.unit.tiny_models import make_model, ragged

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CLOSE = 1e-3
"""Tolerance for float32 results of a GPU compared with those of a CPU."""
LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)


def used_bytes() -> int:
    return torch.cuda.memory_allocated()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    make_model("qwen3", head_dim=64, **sizes).save_pretrained(folder)
    return folder


def updated(
    model: Path,
    scratch: Path,
    device: str,
    *,
    moved: bool,
    backend: type[Any] = TorchBackend,
) -> dict[str, torch.Tensor]:
    """Return the weights after two updates; if `moved`, everything is moved off the device between the gradient and the
    update.
    """
    options = BackendOptions(max_tokens=4096, threads=1, device=device, scratch=scratch, passes=FASTEST)
    made = backend(model, "float32", options, Layout(1).place(0))
    ids, lengths, mask = ragged()
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "versions": np.zeros(len(ids), np.int32),
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
    }
    advantages = np.random.default_rng(0).normal(size=len(ids)).astype(np.float32)
    loss = BatchLoss(LOSS, flat, advantages, np.full(len(ids), 1 / mask.sum(), np.float32), device)
    for step in (1, 2):
        made.forward_backward(Sequences(ids, lengths, mask), 1.0, loss, entropy=loss.entropy)
        if moved:
            before = used_bytes()
            freed = made.shelves.offload(PARTS)
            assert before - used_bytes() >= 0.9 * freed > 0
            assert made.shelves.backload(PARTS) == freed
        made.step(step, adamw(step))
    return made.state().weights


def megatron_rank(place: RankPlace, folder: Path) -> None:
    """Run a rank on the device that `folder` is named after."""
    from services.policy_trainer.worker.megatron.backend import MegatronBackend

    for moved in (False, True) if folder.name == "cuda" else (False,):
        weights = updated(folder.parent / "model", folder, folder.name, moved=moved, backend=MegatronBackend)
        save_file(weights, folder / f"rank-{place.rank}" / f"{moved}.safetensors")


def test_megatron_updates_match_the_cpu_and_leaving_the_device_does_not_change_a_bit(
    model: Path, tmp_path: Path
) -> None:
    importlib.import_module("megatron.core")  # the other tests do not need it
    (tmp_path / "model").symlink_to(model)
    run_group("tests.integration.policy_trainer.test_on_gpu:megatron_rank", Layout(1), tmp_path / DEVICE, DEVICE)
    stayed, moved = (load_file(tmp_path / DEVICE / "rank-0" / f"{each}.safetensors") for each in (False, True))
    for name, weight in updated(model, tmp_path / "cpu", "cpu", moved=False).items():
        assert torch.equal(stayed[name], moved[name]), name
        torch.testing.assert_close(stayed[name], weight, rtol=CLOSE, atol=CLOSE)


def test_updates_match_the_cpu_and_leaving_the_device_does_not_change_a_bit(model: Path, tmp_path: Path) -> None:
    expected = updated(model, tmp_path / "cpu", "cpu", moved=False)
    stayed, moved = (updated(model, tmp_path / name, DEVICE, moved=name == "moved") for name in ("stayed", "moved"))
    for name, weight in expected.items():
        assert torch.equal(stayed[name], moved[name]), name
        torch.testing.assert_close(stayed[name], weight, rtol=CLOSE, atol=CLOSE)


def test_the_reference_scores_as_on_the_cpu_and_leaves_the_device(model: Path, tmp_path: Path) -> None:
    ids, lengths, mask = ragged()
    task = {"token_ids": ids, "lengths": lengths, "loss_mask": mask}

    async def scored(device: str) -> Array:
        scorer = FrozenScorer(
            lambda: FrozenTorch(model, "float32", 4096, device, FASTEST),
            source=model,
            threads=1,
            temperature=1.0,
            scratch=tmp_path / f"{device}.bin",
        )
        await scorer.start()
        ((found,),) = await scorer.score([task], threading.Event())
        if device != "cpu":
            before = used_bytes()
            await scorer.leave()
            assert before - used_bytes() > 10e6
            await scorer.come_back()
            ((again,),) = await scorer.score([task], threading.Event())
            assert np.array_equal(again, found)
        scorer.stop()
        return found

    np.testing.assert_allclose(asyncio.run(scored(DEVICE)), asyncio.run(scored("cpu")), rtol=CLOSE, atol=CLOSE)


def test_the_engine_reproduces_the_logprobs_of_its_samples_and_leaves_the_device(model: Path) -> None:
    async def scene() -> tuple[Array, Array, Array]:
        engine = TransformersEngine(
            model=model, dtype="float32", threads=1, deterministic=False, device=DEVICE, passes=FASTEST
        )
        await engine.start()
        weights = {name: value.copy() for name, value in (await engine.base_weights()).items()}
        ((sample,),) = await engine.generate([Prompt("a", [1, 2, 3])], sampling(samples=1), threading.Event())
        said = await engine.score(np.array([1, 2, 3, *sample.token_ids], np.int32))
        before = used_bytes()
        await engine.sleep()
        assert before - used_bytes() > 10e6
        await engine.wake(frozenset({WEIGHTS}))
        await engine.set_weights(weights)
        await engine.wake(ENGINE)
        again = await engine.score(np.array([1, 2, 3, *sample.token_ids], np.int32))
        await engine.stop()
        return sample.logprobs, said, again

    logprobs, said, again = asyncio.run(scene())
    np.testing.assert_allclose(logprobs, said[2:], rtol=CLOSE, atol=CLOSE)
    assert np.array_equal(said, again)
