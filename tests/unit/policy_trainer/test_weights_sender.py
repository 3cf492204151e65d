"""Tests the start-up drill, which a trainer runs once for all engines that wait for it, however long the drill takes
and whichever versions are published in the meantime.

tests/integration/policy_trainer/test_transfer.py and tests/property/test_transfer_state.py test the transfers over each
communicator.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from msgspec import structs

from proto.messages import AskTransfer, Canary, EndTransfer, TransferOffer, WeightsRef
from services.policy_trainer.worker.weights.channels import GlooChannel
from services.policy_trainer.worker.weights.sender import WeightsSender
from shared.dataplane.client import DataClient
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import RunDir
from shared.topology.services import WeightsRoute
from tests.weights_refs import weights_ref

CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1.0)
FIRST = weights_ref(1, 1, CANARY, drill_seed=7, nbytes=4)
LATER = structs.replace(FIRST, step=2, task_id="weights/1/2")


class Trainer:
    """Rank 0, whose drills last until `may_end` is set."""

    def __init__(self, folder: Path, route: WeightsRoute = "gloo", listen: str = "") -> None:
        run = RunDir(folder, folder, folder)
        self.made = 0
        self.weights = {"w": torch.zeros(1)}
        self.may_end = threading.Event()
        self.sender = WeightsSender(
            run,
            cast(DataClient, None),  # A drill reads nothing from a store.
            route=route,
            device="cpu",
            deadline_s=0.2,
            perturbed=self._perturbed,
            emit=lambda topic, values: None,
            listen=lambda: listen,
        )
        self._host_id = run.host_id

    def _perturbed(self, ref: WeightsRef) -> dict[str, torch.Tensor]:
        self.made += 1
        assert self.may_end.wait(10)
        return self.weights

    async def asked(
        self, engine: int, *, within_s: float, host_id: str = "", communicator: int = 0, first: int = 0
    ) -> TransferOffer:
        """Ask as the mailbox does, which cancels a handler at the request's deadline."""
        request = AskTransfer(
            instance=engine,
            incarnation=1,
            communicator=communicator,
            ranks=1,
            host_id=host_id or self._host_id,
            lineage=1,
            step=1,
            drill=True,
            first=first,
        )
        return await asyncio.wait_for(self.sender.ask(request, cast(Call, None)), within_s)


def test_a_drill_that_takes_longer_than_an_engine_waits_is_ready_when_the_engine_asks_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = Trainer(tmp_path)
        trainer.sender.published(FIRST, {})
        try:
            await trainer.asked(0, within_s=0.1)
        except TimeoutError:
            trainer.sender.published(LATER, {})  # The drill is still running here.
        trainer.may_end.set()
        await asyncio.sleep(0.1)
        trainer.sender.published(LATER, {})  # No engine has taken the drill yet.
        assert [each.name for each in (await trainer.asked(0, within_s=5)).parameters] == ["w"]
        assert trainer.made == 1
        trainer.sender.close()

    asyncio.run(scenario())


def test_a_drill_is_run_again_once_engines_have_taken_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = Trainer(tmp_path)
        trainer.may_end.set()
        trainer.sender.published(FIRST, {})
        await asyncio.gather(*(trainer.asked(engine, within_s=5) for engine in (0, 1)))
        assert trainer.made == 1
        trainer.sender.published(LATER, {})
        await trainer.asked(2, within_s=5)
        assert trainer.made == 2
        trainer.sender.close()

    asyncio.run(scenario())


def test_an_engine_on_another_host_joins_at_the_announced_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = Trainer(tmp_path, listen="tcp://127.0.0.1:7747")
        trainer.may_end.set()
        trainer.sender.published(FIRST, {})
        here = await trainer.asked(0, within_s=5)
        there = await trainer.asked(1, within_s=5, host_id="another host")
        assert (bool(here.meeting), here.store) == (True, "")
        assert (there.meeting, there.store.rpartition(":")[0]) == ("", "127.0.0.1")
        trainer.sender.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("route", "listen"), [("ipc", "tcp://127.0.0.1:7747"), ("gloo", ""), ("nccl", "")])
def test_a_route_that_does_not_reach_another_host_is_refused_for_engines_on_that_host(
    route: WeightsRoute, listen: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path, route, listen)
    trainer.sender.published(FIRST, {})
    with pytest.raises(RpcError, match=f"route {route} works only within one host; fetch the shards instead"):
        asyncio.run(trainer.asked(0, within_s=5, host_id="another host"))


def one_tensor_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Return a trainer that has published three tensors, which it sends one by one."""
    monkeypatch.setattr(GlooChannel, "part_bytes", 8)
    monkeypatch.setattr(GlooChannel, "send", lambda channel, weights: None)
    trainer = Trainer(folder)
    trainer.weights = {name: torch.zeros(2) for name in "abc"}
    trainer.may_end.set()
    trainer.sender.published(FIRST, {})
    return trainer


def test_an_engine_that_does_not_ask_for_the_next_part_in_time_loses_its_communicator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        trainer = one_tensor_at_a_time(tmp_path, monkeypatch)
        offer = await trainer.asked(0, within_s=5)
        end = EndTransfer(instance=0, incarnation=1, communicator=offer.communicator, number=offer.number)
        await trainer.sender.end(end, cast(Call, None))
        assert offer.communicator in trainer.sender._lines
        await asyncio.sleep(0.3)  # longer than the deadline
        assert not trainer.sender._lines
        trainer.sender.close()

    asyncio.run(scenario())


def test_a_version_is_sent_in_parts_where_the_channel_limits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        trainer = one_tensor_at_a_time(tmp_path, monkeypatch)
        communicator, parts = 0, list[tuple[int, int]]()
        for first in range(3):
            trainer.sender.published(structs.replace(LATER, step=2 + first), {})  # does not disturb the version
            offer = await trainer.asked(0, within_s=5, communicator=communicator, first=first)
            parts.append((offer.first, offer.left))
            communicator = offer.communicator
            assert [each.name for each in offer.parameters] == ["a", "b", "c"]
            end = EndTransfer(instance=0, incarnation=1, communicator=communicator, number=offer.number)
            await trainer.sender.end(end, cast(Call, None))
        assert parts == [(0, 2), (1, 1), (2, 0)]
        assert trainer.made == 1
        with pytest.raises(RpcError, match="no transfer of the 3 tensors begins with tensor 3"):
            await trainer.asked(0, within_s=5, communicator=communicator, first=3)
        trainer.sender.close()

    asyncio.run(scenario())
