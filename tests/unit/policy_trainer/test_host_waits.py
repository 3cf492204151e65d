"""Computing a gradient makes the host wait for the device only once, however many micro-batches and blocks of logits
there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proto.messages import LossSpec
from services.policy_trainer.metrics import add_up
from services.policy_trainer.worker.backend import totals_of
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.model import attention, logprobs
from shared.weights.digests import digests_of
from tests.unit.policy_trainer.training import accumulate, one_rank
from tests.unit.tiny_models import make_model, ragged

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal")
"""Operations whose result the host needs before it continues."""


FROM_HOST = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
"""Functions whose values come from the host."""


class Waits(TorchDispatchMode):
    """Counts the operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition(".")[0]
        if name in WAITS:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


class Transfers(TorchFunctionMode):
    """Counts the calls that move values from the host to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_host = function in FROM_HOST or any(each.device.type == "cpu" for each in given)
        if on_host and isinstance(result, torch.Tensor) and result.device.type != "cpu":
            self.seen.append(str(function))
        return result


def gradient(backend: TorchBackend) -> dict[str, float]:
    ids, lengths, mask = ragged()
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
        "versions": np.zeros(len(ids), np.int32),
    }
    ones = np.ones(len(ids), np.float32)
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
    return accumulate(backend, spec, flat, ones, ones / mask.sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_logits", [logprobs.MAX_LOGITS, 128])
def test_progress_is_counted_for_every_micro_batch(
    dtype: str, max_logits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose counter does not advance for a long time counts as hung. In float32, the model itself is not
    called, and with few logits at a time, only a part of it is."""
    monkeypatch.setattr(logprobs, "MAX_LOGITS", max_logits)
    make_model("qwen3", head_dim=16, dtype=getattr(torch, dtype)).save_pretrained(tmp_path)
    backend = one_rank(tmp_path, dtype, max_tokens=16)
    losses, calls = [], []
    own = BatchLoss.__call__
    monkeypatch.setattr(BatchLoss, "__call__", lambda loss, *arguments: losses.append(1) or own(loss, *arguments))
    backend.called.register_forward_hook(lambda *_: calls.append(1))
    gradient(backend)
    assert len(calls) == len(losses) > 2


def test_no_operation_of_a_micro_batch_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("qwen3", head_dim=16).save_pretrained(tmp_path)
    backend = one_rank(tmp_path, "float32", max_tokens=16)
    calls: list[int] = []
    own = BatchLoss.__call__

    def counted(loss: BatchLoss, *arguments: Any) -> Any:
        calls.append(1)
        return own(loss, *arguments)

    monkeypatch.setattr(BatchLoss, "__call__", counted)
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 128)
    with Waits() as waits:
        totals = gradient(backend)
    assert len(calls) > 2
    assert totals["tokens"] > 0
    assert waits.seen == []


@pytest.mark.parametrize("packs", [False, True])
def test_a_micro_batch_moves_to_the_device_in_two_copies(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` computes no values, so reading one raises an error. It stands in for a GPU."""
    monkeypatch.setattr(attention, "packs", lambda device: packs)
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 128)
    ids, lengths, mask = ragged()
    flat = {"loss_mask": mask, "lengths": lengths, "versions": np.zeros(len(ids), np.int32)}
    names = ("rollout_logprobs", "prox_logprobs", "ref_logprobs")
    flat |= {name: np.full(len(ids), -2.0, np.float32) for name in names}
    spec = LossSpec(
        **{"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "anchor": "proximal", "temperature": 0.5},
        **{"kl_estimator": "k3", "kl_coef": 0.1, "entropy_coef": 0.1, "tis_cap": 2.0, "ratio_mask": "sequence"},
    )
    scorer = logprobs.TokenScorer(make_model("qwen3", head_dim=16).to("meta"))
    batches = scorer.plan(ids, lengths, mask, spec.temperature, 20)
    assert len(batches) > 2
    ones = np.ones(len(ids), np.float32)
    with Transfers() as transfers:
        loss = BatchLoss(spec, flat, ones, ones, "meta", keeps=True)
    assert len(transfers.seen) == 1, transfers.seen
    for batch in batches:
        with Transfers() as transfers:
            scores = scorer.score(batch, spec.temperature, loss.entropy)
            total, _ = loss(scores, lambda values: values)
            total.backward()
        assert len(transfers.seen) == 2, transfers.seen


def test_adding_the_sums_of_all_micro_batches_at_once_equals_adding_them_one_by_one() -> None:
    rng = np.random.default_rng(0)
    parts = [
        {
            "loss": torch.tensor(rng.normal(), dtype=torch.float32),
            "clipped": torch.tensor(int(rng.integers(100))),
            "mismatch_max": torch.tensor(rng.random(), dtype=torch.float64),
        }
        for _ in range(50)
    ]
    expected: dict[str, float] = {}
    for part in parts:
        add_up(expected, part)
    assert totals_of(parts) == expected
    assert totals_of([]) == {}


def test_blocks_of_logits_are_larger_on_a_gpu() -> None:
    assert logprobs.max_logits("cuda") == logprobs.GPU_LOGITS * logprobs.max_logits("cpu")


def test_the_digests_of_a_version_wait_for_the_device_once() -> None:
    weights = {str(size): torch.randn(size, 8) for size in (1, 20, 300)}
    with Waits() as waits:
        digests_of(weights)
    assert waits.seen == []  # Reading them all as one list is not counted.
