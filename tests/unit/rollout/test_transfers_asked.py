"""Tests the engine's side of a transfer that is requested first and taken later: interruptions between the two, and the
reports about them.

The trainer's side is simulated; tests/integration/policy_trainer/test_transfer.py uses a real trainer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from proto.messages import Ack, AskTransfer, EndTransfer, ErrorCode, TransferOffer, TransferParameter
from services.rollout.engine import Engine
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.transfer import EngineTransfers, TransferFailed
from shared.dataplane.client import DataClient
from shared.ranks.meeting import Meeting
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.unit.rollout.told_engine import ref_of


class Trainer:
    """A trainer that offers a new communicator for each request, once `answers` is set."""

    def __init__(self) -> None:
        self.asked: list[AskTransfer] = []
        self.ended: list[EndTransfer] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._heard = asyncio.Event()

    async def until(self, *, asked: int = 0, ended: int = 0) -> None:
        """Wait until this many requests have arrived."""
        while len(self.asked) < asked or len(self.ended) < ended:
            self._heard.clear()
            await self._heard.wait()

    async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
        self._heard.set()
        if isinstance(request, EndTransfer):
            self.ended.append(request)
            return Ack()
        self.asked.append(request)
        number = len(self.asked)
        await self.answers.wait()
        return TransferOffer(communicator=number, number=number, deadline_s=1.0, parameters=[])


class Receiver:
    ranks = 1

    def __init__(self) -> None:
        self.received: list[int] = []
        self.left = 0

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> TransferOffer:
        self.received.append(offer.number)
        return offer

    def broken_off(self, why: str) -> Exception:
        return RpcError(ErrorCode.LOST, why)

    def leave(self) -> None:
        self.left += 1


def ends() -> tuple[Trainer, EngineTransfers, Receiver]:
    trainer = Trainer()
    run = cast(RunDir, SimpleNamespace(host_id="here", sockets=Path("/run")))
    transfers = EngineTransfers(run, cast(Client, trainer), instance=0, incarnation=1, deadline_s=1.0)
    return trainer, transfers, Receiver()


def test_an_offer_is_taken_later_over_the_same_communicator() -> None:
    async def scenario() -> None:
        trainer, transfers, receiver = ends()
        offer = await transfers.ask(ref_of(1), receiver)
        assert receiver.received == []
        assert (await transfers.take(offer, receiver)).number == 1
        assert [(each.number, each.failure) for each in trainer.ended] == [(1, "")]
        assert transfers.communicator == 1

    asyncio.run(scenario())


def test_an_unused_offer_is_declined_and_its_communicator_closed() -> None:
    async def scenario() -> None:
        trainer, transfers, receiver = ends()
        transfers.decline(await transfers.ask(ref_of(1), receiver), receiver)
        await trainer.until(ended=1)
        assert [(each.number, bool(each.failure)) for each in trainer.ended] == [(1, True)]
        assert (transfers.communicator, receiver.left) == (0, 1)
        await transfers.bring(ref_of(2), receiver, drill=False)
        assert [each.communicator for each in trainer.asked] == [0, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize("answered", [True, False], ids=["offered", "asked"])
def test_an_immediate_transfer_overtakes_a_transfer_requested_for_later(answered: bool) -> None:
    async def scenario() -> None:
        trainer, transfers, receiver = ends()
        if not answered:
            trainer.answers.clear()
        asking = asyncio.create_task(transfers.ask(ref_of(1), receiver))
        await trainer.until(asked=1)
        if answered:
            await asking
        bringing = asyncio.create_task(transfers.bring(ref_of(2), receiver, drill=False))
        await trainer.until(asked=2)
        trainer.answers.set()
        assert (await bringing).number == 2
        with pytest.raises(TransferFailed, match="another transfer"):
            await transfers.take(await asking, receiver)
        assert (receiver.received, transfers.communicator) == ([2], 2)

    asyncio.run(scenario())


def test_a_load_waits_for_the_answer_to_an_earlier_request_and_takes_it() -> None:
    async def scenario() -> None:
        trainer, transfers, receiver = ends()
        source = WeightsSource(
            cast(DataClient, None), transfers=transfers, route="nccl", emit=lambda topic, values: None, engine=receiver
        )
        delivery = await source.fetch(ref_of(1))
        trainer.answers.clear()
        asking = asyncio.create_task(delivery.begin())
        await trainer.until(asked=1)
        loading = asyncio.create_task(delivery.load(cast(Engine, None)))
        await asyncio.sleep(0)  # This runs the load until it has to wait.
        assert not loading.done()
        trainer.answers.set()
        assert (await loading).route == "nccl"
        await asking
        assert len(trainer.asked) == 1
        delivery.decline()  # The offer has been taken, so the trainer is not sent a decline.
        await transfers.bring(ref_of(2), receiver, drill=False)
        assert receiver.received == [1, 2]
        assert [(each.number, each.failure) for each in trainer.ended] == [(1, ""), (2, "")]

    asyncio.run(scenario())


TABLE = [TransferParameter(name, "float32", [4]) for name in "abcde"]


class InParts(Trainer):
    """A trainer that sends two tensors at a time over one communicator. It stops before tensor `stops_at`, if any, or
    `changes` its tensors after the first part."""

    def __init__(self, stops_at: int = -1, *, changes: bool = False) -> None:
        super().__init__()
        self._stops_at, self._changes = stops_at, changes

    async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
        if isinstance(request, EndTransfer):
            return await super().call(request, reply, deadline_s=deadline_s)
        if request.first == self._stops_at:
            raise RpcError(ErrorCode.MISSING, "the version is gone")
        offer = await super().call(request, reply, deadline_s=deadline_s)
        table = TABLE[::-1] if self._changes and request.first else TABLE
        left = max(0, len(TABLE) - request.first - 2)
        return structs.replace(offer, communicator=1, parameters=table, first=request.first, left=left)


def in_parts(trainer: InParts) -> tuple[EngineTransfers, Receiver]:
    _, transfers, receiver = ends()
    transfers._trainer = cast(Client, trainer)
    return transfers, receiver


@pytest.mark.parametrize("later", [False, True], ids=["at once", "asked first"])
def test_a_version_sent_in_parts_is_asked_for_until_all_tensors_have_arrived(later: bool) -> None:
    async def scenario() -> None:
        trainer = InParts()
        transfers, receiver = in_parts(trainer)
        if later:
            await transfers.take(await transfers.ask(ref_of(1), receiver), receiver)
        else:
            await transfers.bring(ref_of(1), receiver, drill=True)
        assert receiver.received == [1, 2, 3]
        assert [(each.first, each.communicator, each.drill) for each in trainer.asked] == [
            (0, 0, not later),
            (2, 1, not later),
            (4, 1, not later),
        ]
        assert [(each.number, each.failure) for each in trainer.ended] == [(1, ""), (2, ""), (3, "")]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("trainer", "why"),
    [(InParts(stops_at=4), "the version is gone"), (InParts(changes=True), "no longer sends the same version")],
    ids=["gone", "changed"],
)
def test_a_version_of_which_only_some_parts_arrive_is_reported_by_the_receiver(trainer: InParts, why: str) -> None:
    async def scenario() -> None:
        transfers, receiver = in_parts(trainer)
        with pytest.raises(RpcError, match=why):
            await transfers.bring(ref_of(1), receiver, drill=False)
        while not trainer.ended[-1].failure:  # a task of its own reports the end
            await asyncio.sleep(0)
        assert (transfers.communicator, receiver.left) == (0, 1)
        assert [(each.number, why in each.failure) for each in trainer.ended if each.failure] == [(2, True)]

    asyncio.run(scenario())


def test_no_other_transfer_begins_between_two_parts() -> None:
    async def scenario() -> None:
        trainer = InParts()
        transfers, receiver = in_parts(trainer)
        offer = await transfers.ask(ref_of(1), receiver)
        taking = asyncio.create_task(transfers.take(offer, receiver))
        await asyncio.sleep(0)
        other = asyncio.create_task(transfers.ask(ref_of(2), receiver))
        await taking
        await other
        assert [(each.step, each.first) for each in trainer.asked] == [(1, 0), (1, 2), (1, 4), (2, 0)]

    asyncio.run(scenario())


def test_a_load_that_is_cancelled_between_two_parts_leaves_the_receiver_without_a_version() -> None:
    class Silent(InParts):
        async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
            if isinstance(request, AskTransfer) and request.first:
                self.answers.clear()
            return await super().call(request, reply, deadline_s=deadline_s)

    class Watched(Receiver):
        why = ""

        def broken_off(self, why: str) -> Exception:
            self.why = why
            return super().broken_off(why)

    async def scenario() -> None:
        trainer, receiver = Silent(), Watched()
        transfers, _ = in_parts(trainer)
        loading = asyncio.create_task(transfers.bring(ref_of(1), receiver, drill=False))
        await trainer.until(asked=2)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert (receiver.received, receiver.why, transfers.communicator) == ([1], "cancelled", 0)

    asyncio.run(scenario())
