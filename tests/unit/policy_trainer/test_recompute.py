"""Recomputation in the backward pass changes how much a micro-batch keeps, and no bit of the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proto.messages import LossSpec
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.ranks.layout import Layout
from shared.topology.passes import FASTEST
from shared.topology.services import Recompute
from tests.unit.tiny_models import make_model

PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 3}


class Kept(TorchDispatchMode):
    """Remembers the memory that operations allocate, as long as something refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                reference = StorageWeakRef(storage)
                self._made[reference.cdata] = reference, storage.nbytes()
        return result

    def live_bytes(self) -> int:
        """Return the number of bytes that have been allocated and are still in use."""
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def gradient(folder: Path, dtype: str, recompute: Recompute) -> tuple[dict[str, Tensor], int, list[str]]:
    """Return the gradient of one micro-batch, the number of bytes kept for its backward pass, and the operations of
    that pass."""
    options = BackendOptions(
        max_tokens=4096, threads=1, device="cpu", scratch=folder / "offloaded", recompute=recompute, passes=FASTEST
    )
    backend = TorchBackend(folder, dtype, options, Layout(1).place(0))
    rng = np.random.default_rng(0)
    lengths = np.full(4, 64, np.int32)
    ids = rng.integers(3, 60, lengths.sum()).astype(np.int32)
    ids[64:80] = ids[:16]  # a tree, besides two chains
    mask = np.ones(len(ids), np.uint8)
    mask[::64] = 0
    flat = {"loss_mask": mask, "lengths": lengths, "versions": np.zeros(len(ids), np.int32)}
    flat["rollout_logprobs"] = np.full(len(ids), -2.0, np.float32)
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
    ones = np.ones(len(ids), np.float32)
    loss = BatchLoss(spec, flat, ones, ones, "cpu")
    kept = 0
    with Kept() as memory, Operations() as operations:

        def measured(*arguments: Any) -> Any:
            nonlocal kept
            kept += memory.live_bytes()
            operations.names.clear()
            return loss(*arguments)

        backend.forward_backward(Sequences(ids, lengths, mask), 1.0, measured, entropy="none")
    masters = backend._trained.masters.items()
    return {name: each.grad for name, each in masters if each.grad is not None}, kept, operations.names


class Operations(TorchDispatchMode):
    """Collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name().partition(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_selective_recomputation_keeps_less_than_none_and_more_than_layers(dtype: str, tmp_path: Path) -> None:
    make_model("qwen3", dtype=getattr(torch, dtype), **SIZES).save_pretrained(tmp_path)
    found = {each: gradient(tmp_path, dtype, each) for each in ("none", "selective", "layers")}
    grads, kept, operations = ({how: each[part] for how, each in found.items()} for part in range(3))
    for how in ("selective", "layers"):
        assert grads[how].keys() == grads["none"].keys()
        assert all(torch.equal(each, grads["none"][name]) for name, each in grads[how].items())
    assert kept["layers"] < 0.8 * kept["selective"]
    assert kept["selective"] < 0.8 * kept["none"]
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert operations["layers"].count(attention) == 2 * SIZES["num_hidden_layers"]
    assert attention not in operations["selective"]
    products = {how: sum(each.count(name) for name in PRODUCTS) for how, each in operations.items()}
    assert products["selective"] == products["none"] < products["layers"]
