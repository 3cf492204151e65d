"""Tests the choice among torch's attention kernels, which must not change the result."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.model import attention
from shared.ranks import process_group


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return queries of 6 heads, keys and values of 2, and a tree mask. Slots from 6 on do not see slots 3 to 5."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 6, 16, 32), (3, 2, 16, 32), (3, 2, 16, 32)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    mask[6:, 3:6] = False
    return [each.requires_grad_() for each in made], mask.to(device)[None, None].expand(3, 1, 16, 16)


def attended(masked: bool) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    made, mask = inputs()
    out = attention.attend(*made, mask if masked else None, 0.25)
    return [out, *torch.autograd.grad(out.square().sum(), made)]


def test_repeated_keys_give_the_attention_and_the_gradients_of_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = attended(masked=True)
    monkeypatch.setattr(attention, "repeats_keys", lambda device, masked: True)
    repeated = attended(masked=True)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(shared, repeated, strict=True))


def test_keys_are_repeated_only_where_no_fused_kernel_accepts_groups_with_a_mask() -> None:
    assert attention.repeats_keys("cuda", masked=True)
    assert not attention.repeats_keys("cuda", masked=False)
    assert not attention.repeats_keys("cpu", masked=True)


def test_a_process_on_a_gpu_gives_the_attention_of_cudnn_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert process_group.own_device("cpu", 0) == "cpu"
    assert "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    assert process_group.own_device("cuda", 3) == "cuda:0"
    assert os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_fused_kernel_accepts_trees_and_chains_on_a_gpu(masked: bool) -> None:
    made, mask = inputs("cuda", torch.bfloat16)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = attention.attend(*made, mask if masked else None, 0.25)
    assert out.isfinite().all()
