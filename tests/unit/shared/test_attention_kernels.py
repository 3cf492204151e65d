"""Tests the choice among torch's attention kernels, which must not change the result."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.model import attention, tree
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
    monkeypatch.setattr(attention, "repeats_keys", lambda device, flash: True)
    repeated = attended(masked=True)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(shared, repeated, strict=True))


def test_keys_are_repeated_only_on_a_gpu_and_only_where_flash_attention_does_not_accept_the_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert attention.repeats_keys("cuda", flash=False)
    assert not attention.repeats_keys("cuda", flash=True)
    assert not attention.repeats_keys("cpu", flash=False)
    asked: list[bool] = []
    monkeypatch.setattr(attention, "repeats_keys", lambda device, flash: asked.append(flash) or False)
    for dtype in (torch.float32, torch.bfloat16):
        made, mask = inputs(dtype=dtype)
        attention.attend(*made, mask, 0.25)
        attention.attend(*made, None, 0.25)
    assert asked == [False, False, False, True]


def test_a_process_on_a_gpu_gives_the_attention_of_cudnn_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert process_group.own_device("cpu", 0) == "cpu"
    assert "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    assert process_group.own_device("cuda", 3) == "cuda:0"
    assert os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


def packed_and_padded(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, window: int | None, *, more: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the output and the gradients of chains of 3 to 40 nodes, packed and padded. With sequence parallelism,
    `more` nodes make the number of nodes a multiple of the number of ranks."""
    lengths = np.array([40, 3, 17, 39, 5, 16])
    mask = np.ones(lengths.sum(), np.uint8)
    mask[np.cumsum(lengths) - lengths] = 0
    batch = tree.plan(np.arange(lengths.sum()), lengths, mask, max_tokens=1 << 12, hidden_size=8)[0]
    assert len(batch.blocks) > 1
    padding = np.zeros(more, np.int64)
    batch = replace(batch, scatter=np.append(batch.scatter, padding), depths=np.append(batch.depths, padding))
    nodes = len(batch.scatter)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, nodes, 32, generator=generator).to(device, dtype) for heads in (6, 2, 2)]
    sides: list[list[Tensor]] = []
    for packs in (True, False):
        monkeypatch.setattr(attention, "packs", lambda device, packs=packs: packs)
        trees = attention.to_trees(batch, torch.device(device))
        assert all((block.packed is not None) == packs for block in trees.blocks)
        assert trees.in_order == (packs and not more)
        leaves = [each.clone().requires_grad_() for each in made]
        out, _ = attention.attend_trees(
            torch.nn.Module(), *leaves, None, trees=trees, scaling=0.25, sliding_window=window
        )
        sides.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shares_keys", [True, False])
@pytest.mark.parametrize("more", [0, 3])
def test_packed_chains_described_to_the_kernel_give_the_results_of_padded_ones(
    window: int | None, shares_keys: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has no kernel for packed sequences on a CPU, so a loop over the sequences stands in for it."""

    def by_sequence(
        q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Tensor:
        left, right = options["window_size"]
        assert right == 0
        assert max_q == max_k == int(bounds_q.diff().max())
        assert shares_keys == options.get("enable_gqa", False)
        outputs = []
        for begin, end in itertools.pairwise(bounds_q.tolist()):
            place = torch.arange(end - begin)
            seen = (place[:, None] >= place) & ((place[:, None] - place <= left) if left >= 0 else True)
            rows = [each[None, begin:end].transpose(1, 2) for each in (q, k, v)]
            outputs.append(attention.attend(*rows, seen, options["scale"])[0].transpose(0, 1))
        assert torch.equal(bounds_q, bounds_k)
        return torch.cat(outputs)

    monkeypatch.setattr(attention, "varlen_attn", by_sequence)
    monkeypatch.setattr(attention, "_SHARES_KEYS", shares_keys)
    monkeypatch.setattr(attention, "_FLASH_DTYPES", (torch.float64,))
    for packed, padded in packed_and_padded(monkeypatch, "cpu", torch.float64, window, more=more):
        assert torch.allclose(packed, padded, atol=1e-12)


def test_chains_are_packed_only_where_the_kernel_accepts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for capability, packs in {(7, 5): False, (8, 0): True, (9, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert attention.packs(cuda) == packs
    assert not attention.packs(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not attention.packs(cuda)

    def suits(dim: int, value_dim: int, dtype: torch.dtype) -> bool:
        query, value = (torch.zeros(1, 2, 3, size, dtype=dtype) for size in (dim, value_dim))
        return attention._suits_flash(query, value)

    assert suits(64, 64, torch.bfloat16)
    assert suits(256, 256, torch.float16)
    assert not suits(64, 64, torch.float32)
    assert not suits(264, 264, torch.bfloat16)
    assert not suits(100, 100, torch.bfloat16)
    assert not suits(24, 16, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("more", [0, 3])
def test_packed_chains_give_the_attention_and_the_gradients_of_padded_ones(
    window: int | None, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed, padded in packed_and_padded(monkeypatch, "cuda", torch.bfloat16, window, more=more):
        assert float((packed - padded).float().norm()) <= 0.01 * float(padded.float().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_kernel_accepts_trees_and_chains_on_a_gpu(masked: bool, dtype: torch.dtype) -> None:
    made, mask = inputs("cuda", dtype)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = attention.attend(*made, mask if masked else None, 0.25)
    assert out.isfinite().all()


def at_end(device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output and the gradients of the last 5 of 16 queries, from `attend_at_end` and with a mask."""
    made, _ = inputs(device, dtype)
    mask = torch.ones(16, 16, dtype=torch.bool, device=device).tril()[-5:]

    def passed(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), made)]

    last = made[0][:, :, -5:]
    return passed(attention.attend_at_end(last, *made[1:], 0.25)), passed(attention.attend(last, *made[1:], mask, 0.25))


def test_the_last_queries_attend_causally_to_all_keys() -> None:
    for found, wanted in zip(*at_end("cpu", torch.float64), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_kernels_for_the_last_queries_give_the_results_of_a_mask(dtype: torch.dtype) -> None:
    limit = 0.01 if dtype == torch.bfloat16 else 1e-4
    for found, wanted in zip(*at_end("cuda", dtype), strict=True):
        assert float((found - wanted).float().norm()) <= limit * float(wanted.float().norm())
