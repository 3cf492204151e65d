"""Tests where the parts of the training state are after any sequence of moves. test_residency_memory.py tests the parts
that each call needs.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy_trainer.worker.calls import RUNNERS
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
    assert NEEDS.keys() == RUNNERS.keys()


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(RpcError, match="part 'weights': use gradients, optimizer, parameters"):
        parts_named(["weights"])
