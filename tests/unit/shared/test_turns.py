"""Tests the turns that a process takes on shared devices; tests/property/test_device_turns.py tests the scheduler's
side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proto.messages import DeviceOrder, Forward, ForwardBackward, HoldDevices, OptimStep
from services.policy_trainer.worker import devices
from shared.actor.service import UNUSABLE_STATUS, Service
from shared.colocation.devices import GRADIENTS, OPTIMIZER, PARAMETERS, PARTS_OF, Parts
from shared.colocation.turns import OwnDevices, SharedDevices, take_turns
from shared.rundir import RunDir

LIMIT_S = 10.0


class Sharer(Service):
    NAME = "rollout"
    HEARTBEATS = False

    async def start(self) -> None:
        take_turns(self, _nothing)


async def _nothing(parts: Parts) -> Parts:
    return parts


def test_a_process_without_a_supervisor_exits_instead_of_taking_a_turn(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    try:
        by_hand = Sharer(run, 1)
        assert asyncio.run(by_hand.run_until_stopped()) == UNUSABLE_STATUS
        assert "only a launcher may start it" in by_hand.cause
        assert f"launch.ctl --run {run.path} restart rollout/1" in by_hand.cause
    finally:
        run.remove_volatile()


class Desk:
    """A service whose scheduler is the test: the test sees every report and issues the grants."""

    NAME, instance, incarnation = "policy-trainer-worker", 0, 1

    def __init__(self) -> None:
        self.scheduler = self
        self.reports: asyncio.Queue[HoldDevices] = asyncio.Queue()
        self.orders: asyncio.Queue[DeviceOrder] = asyncio.Queue()

    async def call(self, report: HoldDevices, reply: type[DeviceOrder], *, deadline_s: float) -> DeviceOrder:
        self.reports.put_nowait(report)
        return await self.orders.get()


def test_a_wait_for_a_turn_continues_when_other_calls_end() -> None:
    async def scene() -> None:
        desk = Desk()
        turns = SharedDevices(cast(Any, desk), _nothing)
        running = asyncio.create_task(turns.run())
        waiting = asyncio.create_task(turns.acquire(frozenset({PARAMETERS})))
        async with asyncio.timeout(LIMIT_S):
            while not (await desk.reports.get()).wants:
                pass
            turns.done()  # For example, a driver's request for the worker's state has ended.
            desk.orders.put_nowait(DeviceOrder(parts=[PARAMETERS], granted=True))
            await waiting
        running.cancel()

    asyncio.run(scene())


class Turns:
    """Turns that are always granted."""

    ended = 0
    acquired: Parts = frozenset()

    async def acquire(self, parts: Parts) -> None:
        self.acquired |= parts

    def done(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("followed", [False, True])
def test_a_turn_ends_after_a_forward_pass_but_not_within_an_update(
    followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    monkeypatch.setattr(devices, "take_turns", lambda service, leave: turns)
    mine = devices.Devices("policy", cast(Any, None), cast(Any, None))
    mine.share(cast(Any, None))
    batch: Any = None
    call = {"driver": 1, "order": 1}
    mine.after(Forward(**call, batch=batch, keys=["prox_logprobs"], temperature=1.0), followed=followed)
    assert turns.ended == (not followed)
    mine.after(ForwardBackward(**call, batch=batch, loss=batch), followed=followed)
    mine.after(OptimStep(**call, step=1, last=False, optimizer=batch), followed=followed)
    assert turns.ended == (not followed)
    mine.after(OptimStep(**call, step=1, last=True, optimizer=batch), followed=followed)
    assert turns.ended == 2 * (not followed)


def test_a_request_from_a_driver_during_loading_does_not_end_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        turns = Turns()
        monkeypatch.setattr(devices, "take_turns", lambda service, leave: turns)
        mine = devices.Devices("policy", cast(Any, None), cast(Any, None))
        mine.share(cast(Any, None))
        await mine.acquire_room()
        assert turns.acquired == PARTS_OF["policy-trainer-worker"]  # all parts exist once the model is loaded
        await mine.drop_gradients()
        assert turns.ended == 0
        mine.loaded(cast(Any, object()))
        assert turns.ended == 1

    asyncio.run(scene())


@pytest.mark.parametrize("shows_parameters", [True, False])
def test_engines_that_read_the_parameters_may_copy_them_until_they_leave_the_device(
    shows_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def settled() -> None:
        done.append("settled")

    async def on_compute(work: Callable[[], Any]) -> Any:
        return work()

    def offload(parts: frozenset[str]) -> int:
        done.append(" and ".join(sorted(parts)))
        return 1

    async def scene() -> None:
        leaves: list[Callable[[Parts], Awaitable[Parts]]] = []
        monkeypatch.setattr(devices, "take_turns", lambda service, leave: leaves.append(leave) or OwnDevices())
        mine = devices.Devices("policy", on_compute, settled, shows_parameters=shows_parameters)
        mine.share(cast(Any, None))
        mine.loaded(cast(Any, SimpleNamespace(shelves=SimpleNamespace(offload=offload))))
        for parts in (frozenset({GRADIENTS, OPTIMIZER}), frozenset({PARAMETERS})):
            assert await leaves[0](parts) == parts

    asyncio.run(scene())
    first = [] if shows_parameters else ["settled"]
    assert done == [*first, "gradients and optimizer", "settled", "parameters"]
