"""Where parts of the training state are: a call always finds what it needs, whoever moved what before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy_trainer.worker.residency import NEEDS, PARTS, Residency, parts_named
from shared.rpc.errors import RpcError

SETS = st.frozensets(st.sampled_from(sorted(PARTS)))
EVENTS = st.lists(st.one_of(st.tuples(st.sampled_from(["offload", "backload"]), SETS), st.sampled_from(list(NEEDS))))


@given(EVENTS)
def test_moves_keep_the_model_of_one_memory_each(events: list[object]) -> None:
    """A plain model beside it: a part moves only from where it is, and calls run with their needs on the device."""
    residency = Residency()
    device: set[str] = set(PARTS)
    for event in events:
        if isinstance(event, tuple):
            name, parts = event
            moving = residency.offload(parts) if name == "offload" else residency.backload(parts)
            assert moving == (parts & device if name == "offload" else parts - device)
            device = device - moving if name == "offload" else device | moving
        else:
            moving = residency.backload(NEEDS[event])  # type: ignore[index]
            assert not moving & device
            device |= moving
            assert NEEDS[event] <= device  # type: ignore[index]
        assert residency.on_host == PARTS - device


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(RpcError, match="part 'weights': use gradients, optimizer, parameters"):
        parts_named(["weights"])
