"""Tests that each order number is used for only one call per driver incarnation, regardless of the state of the
ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from proto.messages import ErrorCode, GetWorkerState, HeldSnapshot, InitModel, WorkerReady, WorkerRequest, WorkerState
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from services.policy_trainer.worker.call_queue import CallQueue
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError

DRIVER = 7


class Rank:
    """A client of a worker that executes the calls that its real queue admits. `calls` holds every call that
    arrived."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        """The rank holds snapshots of the steps in `held`."""
        self.lane = CallQueue()
        self.held = [HeldSnapshot(lineage=1, step=step) for step in held]
        self.calls: list[WorkerRequest] = []
        self.ending = False

    async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
        if self.ending:
            raise RpcError(ErrorCode.DRAINING, "the rank is going away")
        if isinstance(request, GetWorkerState):
            self.lane.take_over(request.driver, request.at_least)
            return WorkerState(step=0, driver=DRIVER, order=self.lane.done, dirty=False, snapshots=self.held)
        self.calls.append(request)
        self.lane.add(request, None)  # type: ignore[arg-type]
        await self.lane.next()
        return WorkerReady(step=0, parameters=1)

    def die(self) -> None:
        self.lane = CallQueue()


def test_a_call_that_reaches_a_restarted_rank_does_not_take_the_place_of_a_later_call() -> None:
    async def scene() -> None:
        ranks = [Rank(), Rank()]
        clients: list[Any] = list(ranks)
        workers = WorkerDispatch(clients, Layout(2), DRIVER)
        await workers.take_over()
        for _ in range(3):
            await workers.init_model()
        late = ranks[1].calls[-1]
        for rank in ranks:
            rank.die()
        with pytest.raises(RpcError):
            await workers.init_model()
        await workers.take_over()
        with pytest.raises(RpcError, match="was already used") as refused:
            ranks[1].lane.add(late, None)  # type: ignore[arg-type]
        assert refused.value.code == ErrorCode.CONFLICT
        await workers.init_model()
        given = [call.order for call in ranks[0].calls]
        assert len(set(given)) == len(given) == 5
        assert all(isinstance(call, InitModel) for call in ranks[0].calls)

    asyncio.run(scene())


def test_a_snapshot_counts_only_if_every_rank_holds_it() -> None:
    clients: list[Any] = [Rank([4, 5]), Rank([5, 6]), Rank([6, 5])]
    state = asyncio.run(WorkerDispatch(clients, Layout(3), DRIVER).take_over())
    assert [each.step for each in state.snapshots] == [5]
    one: list[Any] = [Rank([4, 5])]
    assert [each.step for each in asyncio.run(WorkerDispatch(one, Layout(1), DRIVER).take_over()).snapshots] == [4, 5]


def test_a_rank_that_exits_during_a_takeover_counts_as_lost() -> None:
    ranks = [Rank(), Rank()]
    clients: list[Any] = list(ranks)
    ranks[1].ending = True
    with pytest.raises(WorkersLost, match="going away"):
        asyncio.run(WorkerDispatch(clients, Layout(2), DRIVER).take_over())
