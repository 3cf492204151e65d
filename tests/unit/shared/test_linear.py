"""Tests linear layers that oneDNN computes: values and gradients equal those of torch up to rounding, only suitable
layers use oneDNN, and its kernels take a bounded amount of memory."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shared.model import linear
from shared.model.linear import MIN_PRODUCTS, accelerate, has_slow_mkl, suits

LARGE = (8, 64, 1 << 13)
"""Rows, inputs and outputs of the smallest product that oneDNN computes."""


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "USES_ONEDNN", True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs of all products that oneDNN computes in the test."""
    shapes: list[tuple[int, ...]] = []
    real = linear.product

    def watched(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(rows.shape))
        return real(rows, weight, bias)

    monkeypatch.setattr(linear, "product", watched)
    return shapes


def layers(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """Return a layer and an accelerated copy of it, in float32."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    fast = copy.deepcopy(plain)
    accelerate(fast)
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(38, 1200, 700), (2, 19, 1200, 700), (38, 700, 1200)])
def test_values_and_gradients_equal_those_of_float64(
    bias: bool, shape: tuple[int, ...], products: list[tuple[int, ...]]
) -> None:
    *leading, inputs, outputs = shape
    plain, fast = layers(inputs, outputs, bias)
    exact = copy.deepcopy(plain).double()
    rows = torch.randn(*leading, inputs)
    upstream = torch.randn(*leading, outputs)

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


def test_factors_that_are_not_contiguous_have_the_same_gradients() -> None:
    plain, fast = layers(700, 1200, bias=True)
    rows = torch.randn(700, 38).t()
    grads = []
    for layer in (plain, fast):
        layer(rows).sum().backward()  # the gradient of a sum is one number with strides of 0
        grads.append([each.grad for each in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_only_requested_gradients_are_computed(products: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    _, fast = layers(inputs, outputs, bias=True)
    fast(torch.randn(rows, inputs)).sum().backward()  # the input of a first layer needs no gradient
    assert products == [(rows, inputs), (inputs, rows)]
    products.clear()
    with torch.no_grad():
        fast(torch.randn(rows, inputs))
    assert products == [(rows, inputs)]


def test_small_layers_and_other_dtypes_use_torchs_own_products(products: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    assert rows * inputs * outputs == MIN_PRODUCTS
    for dtype, count in [(torch.float32, rows - 1), (torch.float64, rows), (torch.bfloat16, rows)]:
        plain, fast = (each.to(dtype) for each in layers(inputs, outputs, bias=True))
        given = torch.randn(count, inputs, dtype=dtype)
        assert torch.equal(fast(given), plain(given))
    assert not products


@pytest.mark.parametrize(
    ("cpuinfo", "onednn"), [("vendor_id\t: GenuineIntel\n", False), ("vendor_id\t: AuthenticAMD\n", True), ("", True)]
)
def test_intels_cpus_use_mkl(
    cpuinfo: str, onednn: bool, products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_slow_mkl(cpuinfo) == onednn
    monkeypatch.setattr(linear, "USES_ONEDNN", has_slow_mkl(cpuinfo))
    rows, inputs, outputs = LARGE
    _, fast = layers(inputs, outputs, bias=True)
    fast(torch.randn(rows, inputs))
    assert bool(products) == onednn


def test_only_contiguous_weights_and_biases_of_the_usual_shapes_suit_onednn() -> None:
    rows, inputs, outputs = LARGE
    given, weight, bias = torch.zeros(rows, inputs), torch.zeros(outputs, inputs), torch.zeros(outputs)
    assert suits(given, weight, None)
    assert suits(given, weight, bias)
    assert not suits(given, weight, torch.zeros(2 * outputs)[::2])
    assert not suits(given, weight, torch.zeros(1).expand(outputs))
    assert not suits(given, weight, torch.zeros(1))
    assert not suits(given, torch.zeros(inputs, outputs).t(), bias)
    assert not suits(torch.zeros(MIN_PRODUCTS), torch.zeros(1, MIN_PRODUCTS), None)
    assert not suits(given, torch.zeros(outputs, inputs + 1), None)  # torch's own error names the shapes
    with torch.backends.mkldnn.flags(enabled=False):
        assert not suits(given, weight, bias)


def test_replaced_weights_take_effect_in_the_next_pass(products: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    _, fast = layers(inputs, outputs, bias=False)
    given = torch.randn(rows, inputs)
    with torch.no_grad():
        before = fast(given)
        fast.weight.data = fast.weight.data * 2
        assert torch.equal(fast(given), before * 2)
    assert len(products) == 2


def test_a_dropped_model_is_freed_at_once() -> None:
    """A model that waits for garbage collection takes up memory alongside its successor, or forever after
    `gc.freeze`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    accelerate(model)
    parameters = [weakref.ref(each) for each in model.parameters()]
    gc.disable()
    try:
        del model
        assert all(each() is None for each in parameters)
    finally:
        gc.enable()


_MANY_SHAPES = """
import random
import torch
from shared.model import cpu
cpu.set_up(1)
from shared.model import linear
linear.USES_ONEDNN = True

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

weight = torch.randn(512, 128, requires_grad=True)
sizes = random.Random(0).sample(range(512, 2048), 200)
for count, size in enumerate([2048, *sizes]):
    linear.linear(torch.randn(size, 128, requires_grad=True), weight).sum().backward()
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
