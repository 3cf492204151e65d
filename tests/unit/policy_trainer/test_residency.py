"""Tests where the parts of the training state are after any sequence of moves. test_residency_memory.py tests the parts
that each call needs.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy_trainer.worker.calls.state import StateCalls
from services.policy_trainer.worker.calls.training import TrainingCalls
from services.policy_trainer.worker.calls.weights import WeightsCalls
from services.policy_trainer.worker.colocation.residency import NEEDS, PARTS, Part, Residency, parts_named
from shared.rpc.errors import RpcError

SETS = st.frozensets(st.sampled_from(sorted(PARTS)))
MOVES = st.lists(st.tuples(st.sampled_from(["offload", "backload"]), SETS))


@given(MOVES)
def test_a_part_moves_only_when_it_is_elsewhere(moves: list[tuple[str, frozenset[Part]]]) -> None:
    residency = Residency()
    device: set[str] = set(PARTS)
    for name, parts in moves:
        moving = residency.offload(parts) if name == "offload" else residency.backload(parts)
        assert moving == (parts & device if name == "offload" else parts - device)
        device = device - moving if name == "offload" else device | moving
        assert residency.on_host == PARTS - device
    residency.forget()
    assert not residency.on_host


def test_the_needs_of_every_call_are_declared() -> None:
    nothing: Any = MagicMock()
    nothing.model.head = "language"
    subjects = (TrainingCalls(nothing, nothing, None), WeightsCalls(nothing, nothing))
    runners = [*subjects, StateCalls(nothing, nothing, several_hosts=False)]
    kinds = [kind for subject in runners for kind in subject.runners]
    assert NEEDS.keys() == set(kinds)
    assert len(set(kinds)) == len(kinds)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(RpcError, match="part 'weights': use gradients, optimizer, parameters"):
        parts_named(["weights"])
