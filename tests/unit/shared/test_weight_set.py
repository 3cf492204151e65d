"""Tests the record of a policy version, which the trainer and the engines share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proto.messages import TransferParameter, WeightsKind
from shared.tensors_torch import to_numpy
from shared.weights.weight_set import Base, WeightSet

TENSORS = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros((), dtype=torch.float32)}


def test_tensors_and_the_arrays_that_arrive_from_them_have_the_same_record() -> None:
    published = WeightSet.of(TENSORS)
    assert published == WeightSet.of({name: to_numpy(tensor) for name, tensor in TENSORS.items()})
    assert published.parameters == [TransferParameter("b", "bfloat16", [2, 3]), TransferParameter("a", "float32", [])]
    assert (published.kind, published.base, published.nbytes) == (WeightsKind.FULL, None, 16)
    assert WeightSet.of(TENSORS, Base([1])).kind == WeightsKind.ADAPTER


def test_the_name_of_a_base_depends_on_every_digest() -> None:
    assert Base.of({"b": 2, "a": 1}) == Base([1, 2])
    assert len({Base(digests).name for digests in ([1, 2], [2, 1], [1, 3], [1], [])}) == 5


def test_digests_belong_to_the_sorted_names() -> None:
    record = WeightSet(WeightSet.of(TENSORS).parameters, digests=[1, 2])
    assert record.digest_of == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"b": TENSORS["b"]}, "1 parameters given for the engine's 2: missing a, unexpected none"),
        ({**TENSORS, "c": TENSORS["a"]}, "missing none, unexpected c"),
        (
            {**TENSORS, "b": TENSORS["b"].T},
            r"parameter b: bfloat16 \[3, 2\] given, but the engine's model has bfloat16",
        ),
        ({**TENSORS, "a": np.zeros((), np.float64)}, r"parameter a: float64 \[\] given"),
    ],
)
def test_a_set_with_another_name_shape_or_type_does_not_fit(given: dict[str, torch.Tensor], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        WeightSet.of(TENSORS).check_fits(WeightSet.of(given))


def test_a_set_in_another_order_fits() -> None:
    WeightSet.of(TENSORS).check_fits(WeightSet.of(dict(reversed(TENSORS.items()))))
