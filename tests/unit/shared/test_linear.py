"""Tests linear layers that oneDNN computes: values and gradients equal those of torch up to rounding, only suitable
layers use oneDNN, and its kernels take a bounded amount of memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shared.model import linear
from shared.model.linear import MIN_PRODUCTS, accelerate, suits

LARGE = (8, 64, 2048)
"""Rows, inputs and outputs of the smallest layer that suits oneDNN."""


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs of all products that oneDNN computes in the test."""
    shapes: list[tuple[int, ...]] = []
    real = linear._product

    def watched(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(rows.shape))
        return real(rows, weight, bias)

    monkeypatch.setattr(linear, "_product", watched)
    return shapes


def layers(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """Return a layer and an accelerated copy of it, in float32."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(37, 300), (2, 19, 300)])
def test_values_and_gradients_equal_those_of_float64(
    bias: bool, shape: tuple[int, ...], products: list[tuple[int, ...]]
) -> None:
    plain, fast = layers(300, 177, bias)
    exact = copy.deepcopy(plain).double()
    rows = torch.randn(shape)
    upstream = torch.randn(*shape[:-1], 177)

    def passed(layer: nn.Linear, dtype: torch.dtype) -> list[Tensor]:
        given = rows.to(dtype).requires_grad_()
        out = layer(given)
        out.backward(upstream.to(dtype))
        assert given.grad is not None
        found = [out.detach(), given.grad, *(each.grad for each in layer.parameters() if each.grad is not None)]
        return [each.double() for each in found]

    wanted = passed(exact, torch.float64)
    found = passed(fast, torch.float32)
    assert len(products) == 3
    assert len(found) == len(wanted) == (4 if bias else 3)
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) <= 1e-6


def test_only_requested_gradients_are_computed(products: list[tuple[int, ...]]) -> None:
    _, fast = layers(64, 2048, bias=True)
    fast(torch.randn(8, 64)).sum().backward()  # a first layer: its input needs no gradient
    assert products == [(8, 64), (2048, 8)]
    products.clear()
    with torch.no_grad():
        fast(torch.randn(8, 64))
    assert products == [(8, 64)]


def test_small_layers_and_other_dtypes_use_torchs_own_products(products: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    assert rows * inputs * outputs == MIN_PRODUCTS
    assert suits(torch.zeros(rows, inputs), torch.zeros(outputs, inputs))
    for dtype, count in [(torch.float32, rows - 1), (torch.float64, rows), (torch.bfloat16, rows)]:
        plain, fast = (each.to(dtype) for each in layers(inputs, outputs, bias=True))
        given = torch.randn(count, inputs, dtype=dtype)
        assert torch.equal(fast(given), plain(given))
    assert not products


def test_replaced_weights_take_effect_in_the_next_pass(products: list[tuple[int, ...]]) -> None:
    _, fast = layers(64, 2048, bias=False)
    rows = torch.randn(8, 64)
    with torch.no_grad():
        before = fast(rows)
        fast.weight.data = fast.weight.data * 2
        assert torch.equal(fast(rows), before * 2)
    assert len(products) == 2


_MANY_SHAPES = """
import random
import torch
from shared.model import cpu
cpu.set_up(1)
from shared.model.linear import linear

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

weight = torch.randn(512, 128, requires_grad=True)
sizes = random.Random(0).sample(range(512, 2048), 200)
for count, size in enumerate([2048, *sizes]):
    linear(torch.randn(size, 128, requires_grad=True), weight).sum().backward()
    weight.grad = None
    if count == 0:
        before = resident()
print(resident() - before)
"""


def test_kernels_for_many_numbers_of_rows_take_a_bounded_amount_of_memory() -> None:
    """Without the limit, the process grows by 300 MB."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY_SHAPES],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(linear.__file__).parents[2],
        timeout=120,
    )
    assert int(done.stdout) <= 64 << 20
