"""Versions share the places of an engine, on a virtual clock: each gets turns, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine
from contextlib import suppress
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from proto.messages import Canary, ErrorCode, WeightsRef
from services.rollout.direct import named
from services.rollout.direct.gate import ScoreGate
from services.rollout.direct.named import NamedVersions
from shared.rpc.errors import RpcError
from tests.sim.clock import VirtualLoop

LOAD_S, SAMPLE_S = 3.0, 0.5


class Stand:
    """Stands in for the engine, the stores and the proof of weights."""

    def __init__(self) -> None:
        self.swaps = 0
        self.loads = 0
        self.fetched = 0

    def retain(self, swaps: Collection[int]) -> bool:
        return not swaps

    async def fetch(self, ref: WeightsRef) -> None:
        self.fetched += 1

    async def load(self, ref: WeightsRef, delivery: object) -> None:
        await asyncio.sleep(LOAD_S)
        self.swaps += 1
        self.loads += 1


def ref(number: int) -> WeightsRef:
    nothing = Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), tolerance=0.0)
    numbers = {"lineage": number, "step": 0, "fence": 1, "nbytes": 0, "drill_seed": 0}
    return WeightsRef(task_id=f"weights/{number}/0", store="", canary=nothing, drill=nothing, **numbers)


def versions_of(stand: Stand, places: int) -> NamedVersions:
    one = cast(Any, stand)
    return NamedVersions(one, one, one, ScoreGate(needed=False), places)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop(Random(0))
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(scenario)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def sample(versions: NamedVersions, of: WeightsRef) -> None:
    """Sample once, as a server does: load the version if the engine lacks it, and ask again if there is no place."""
    while True:
        try:
            with versions.using((of.task_id, of.fence)):
                await asyncio.sleep(SAMPLE_S)
                return
        except RpcError as error:
            if error.code not in (ErrorCode.MISSING, ErrorCode.BUSY):
                raise
            if error.code == ErrorCode.MISSING:
                with suppress(RpcError):
                    await versions.load(of)
            await asyncio.sleep(named.BUSY_S)


@pytest.mark.parametrize("clients", [2, 3])
def test_versions_that_are_always_asked_for_take_turns_in_one_place(clients: int) -> None:
    async def scenario() -> None:
        stand, done = Stand(), Counter[int]()
        versions = versions_of(stand, 1)

        async def client(number: int) -> None:
            while True:
                await sample(versions, ref(number))
                done[number] += 1

        tasks = [asyncio.create_task(client(number)) for number in range(1, clients + 1) for _ in range(3)]
        async with asyncio.timeout(600):
            while len(done) < clients or min(done.values()) < 20:
                await asyncio.sleep(SAMPLE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert stand.loads <= done.total() / 3
        assert stand.fetched <= stand.loads + clients  # nobody fetches before there is room

    run(scenario())


def test_a_version_that_nobody_uses_gives_its_place_up_at_once() -> None:
    async def scenario() -> None:
        stand = Stand()
        versions = versions_of(stand, 1)
        for number in range(1, 5):
            await sample(versions, ref(number))
            await asyncio.sleep(2 * named.IDLE_S)
            assert stand.loads == number
        await versions.load(ref(9))  # and without waiting, as nobody uses the last one

    run(scenario())


def test_a_version_has_its_first_use_before_another_takes_its_place() -> None:
    async def scenario() -> None:
        stand = Stand()
        versions = versions_of(stand, 1)
        await versions.load(ref(1))
        with pytest.raises(RpcError, match="no place for version weights/2/0"):
            await versions.load(ref(2))
        with versions.using((ref(1).task_id, 1)):
            pass
        await sample(versions, ref(2))
        assert stand.loads == 2

    run(scenario())


def test_a_caller_that_no_longer_asks_loses_its_place_in_the_order() -> None:
    async def scenario() -> None:
        versions = versions_of(Stand(), 1)
        with suppress(RpcError):
            await versions.load(ref(1))
        with suppress(RpcError):
            await versions.load(ref(2))  # and never again
        await asyncio.sleep(named.TURN_S + named.WAITS_S)
        with versions.using((ref(1).task_id, 1)):
            pass

    run(scenario())
