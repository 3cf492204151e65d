"""Tests where the parts of the training state are after any sequence of moves. test_residency_memory.py tests the parts
that each call needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.policy_trainer.worker.calls.clients import ClientCalls
from services.policy_trainer.worker.calls.state import StateCalls
from services.policy_trainer.worker.calls.training import TrainingCalls
from services.policy_trainer.worker.calls.weights import WeightsCalls
from services.policy_trainer.worker.devices import NEEDS, Devices, parts_named
from shared.colocation.devices import PARTS, Part
from shared.rpc.errors import RpcError

SETS = st.frozensets(st.sampled_from(sorted(PARTS)))
MOVES = st.lists(st.tuples(st.sampled_from(["offload", "backload"]), SETS))


@given(MOVES)
def test_a_part_moves_only_when_it_is_elsewhere(moves: list[tuple[str, frozenset[Part]]]) -> None:
    moved: list[frozenset[Part]] = []

    def move(parts: frozenset[Part]) -> int:
        moved.append(parts)
        return len(parts)

    async def on_compute(work: Callable[[], Any]) -> Any:
        return work()

    async def scene() -> None:
        devices = Devices("policy", on_compute, AsyncMock())
        devices.loaded(MagicMock(**{"shelves.offload": move, "shelves.backload": move}))
        device = PARTS
        for name, parts in moves:
            assert await (devices.offload(parts) if name == "offload" else devices.backload(parts)) == sum(
                map(len, moved)
            )
            wanted = parts & device if name == "offload" else parts - device
            assert moved == ([wanted] if wanted else [])
            device = device - parts if name == "offload" else device | parts
            moved.clear()
        devices.loaded_anew()
        await devices.backload(PARTS)
        assert not moved

    asyncio.run(scene())


def test_the_needs_of_every_call_are_declared() -> None:
    nothing: Any = MagicMock()
    nothing.model.head = "language"
    nothing.backend.called = torch.nn.Module()
    subjects = (TrainingCalls(nothing, nothing, None), WeightsCalls(nothing, nothing))
    states = StateCalls(nothing, nothing, several_hosts=False)
    kinds = [kind for subject in (*subjects, states) for kind in subject.runners]
    assert len(set(kinds)) == len(kinds)
    runners = ClientCalls(nothing, nothing, dict.fromkeys(kinds, nothing), states, several_hosts=False).runners
    assert NEEDS.keys() == runners.keys()
    assert runners.keys() > set(kinds)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(RpcError, match="part 'weights': use gradients, optimizer, parameters"):
        parts_named(["weights"])
