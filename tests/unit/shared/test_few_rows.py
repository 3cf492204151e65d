"""Linear layers for few rows agree with the plain implementation up to rounding, and the plain implementation is used
where bits or gradients matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shared.model import few_rows
from shared.model.few_rows import MAX_ROWS, FewRows


def passed(layer: nn.Linear, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of `layer` outside and inside the mode."""
    with torch.no_grad():
        plain = layer(rows)
        with FewRows():
            inside = layer(rows)
        assert torch.equal(inside, few_rows.linear(rows, layer.weight, layer.bias))
        return plain, inside


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs for which the implementation for few rows was used."""
    shapes: list[tuple[int, ...]] = []
    real = few_rows._linear

    def watched(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(rows.shape))
        return real(rows, weight, bias)

    monkeypatch.setattr(few_rows, "_linear", watched)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_are_equal_up_to_rounding(bias: bool, seen: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    plain, other = passed(nn.Linear(300, 77, bias=bias), torch.randn(2, 3, 300))
    assert seen == [(2, 3, 300)] * 2
    assert other.shape == plain.shape
    assert torch.allclose(other, plain, atol=1e-5)


def test_many_rows_other_dtypes_and_gradients_use_the_plain_implementation(seen: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    assert torch.equal(*passed(nn.Linear(64, 8), torch.randn(MAX_ROWS + 1, 64)))
    assert torch.equal(*passed(nn.Linear(64, 8, dtype=torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)))
    layer = nn.Linear(64, 8)
    with FewRows():
        layer(torch.randn(2, 64)).sum().backward()
    assert layer.weight.grad is not None
    assert not seen
