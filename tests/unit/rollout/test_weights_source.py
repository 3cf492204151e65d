"""Tests the route by which weights reach an engine, the drill of each route before it is used, and failed transfers.

The trainer's side is simulated; tests/integration/policy_trainer/test_transfer.py and whole runs use a real trainer.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from proto.messages import Ack, AskTransfer, BatchMeta, TransferOffer, TransferParameter, WeightsRef
from proto.registry import Message
from proto.tensors import Array
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights import source as weights_source
from services.rollout.weights.source import Arrays, WeightsSource, own_drill
from services.rollout.weights.sync import HeldVersion, WeightsSync
from services.rollout.weights.transfer import EngineTransfers, TransferFailed
from shared.dataplane.client import DataClient
from shared.ranks.meeting import LOOPBACK, Meeting
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.tensors_torch import to_torch
from shared.weights.drill import perturb
from shared.weights.weight_set import described
from tests.unit.rollout.rollout_engine import MODEL
from tests.unit.rollout.test_weights import SEED, base, version


class InPlace(TransformersEngine):
    """An engine that receives weights in place, as vLLM does. Transfers never update the parameter named by
    `deaf`, if any."""

    ranks = 1
    deaf = ""

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> TransferOffer:
        sent = SENT[offer.number]
        kept = {self.deaf: (await self.base_weights())[self.deaf]} if self.deaf else {}
        await self.set_weights({**sent, **kept})
        return offer

    def broken_off(self, why: str) -> Exception:
        return TransferFailed(why)

    def leave(self) -> None:
        """Do nothing, because no group was joined."""

    async def base_weights(self) -> dict[str, Array]:
        return base()


SENT: dict[int, Mapping[str, Array]] = {}
"""Weights by the step of their version; -1 is the step of the drill's weights."""


class Trainer:
    """A trainer that sends the weights in SENT, unless it is `away`."""

    def __init__(self) -> None:
        self.away = False
        self.drill_is_made = True
        self.asked: list[int] = []

    async def bring(self, ref: WeightsRef, receiver: Any, *, drill: bool) -> Any:
        number = -1 if drill else ref.step
        self.asked.append(number)
        if self.away:
            raise TransferFailed("the trainer is away")
        if drill and not self.drill_is_made:
            raise TransferFailed("the drill was not completed in time")
        parameters: list[TransferParameter] = described({key: to_torch(each) for key, each in SENT[number].items()})
        return await receiver.receive(
            TransferOffer(communicator=1, number=number, deadline_s=1.0, parameters=parameters), Meeting(LOOPBACK)
        )


class Shards:
    """A data plane that has all versions of SENT."""

    async def fetch(self, meta: BatchMeta, keys: Sequence[str], **_: object) -> list[Mapping[str, Array]]:
        return [SENT[int(task.task_id.rpartition("/")[2])] for task in meta.tasks]


def scene(engine: InPlace) -> tuple[Trainer, WeightsSource, WeightsSync, list[tuple[str, dict[str, Any]]]]:
    told: list[tuple[str, dict[str, Any]]] = []
    trainer = Trainer()
    source = WeightsSource(
        cast(DataClient, Shards()),
        transfers=cast(EngineTransfers, trainer),
        route="nccl",
        emit=lambda topic, values: told.append((topic, values)),
        engine=engine,
    )
    return trainer, source, WeightsSync(engine, "rollout/0", lambda *each: told.append(each), source), told


async def loaded(sync: WeightsSync, source: WeightsSource, ref: WeightsRef) -> str:
    """Load as the worker does, from the store if the transfer fails; return the route."""
    try:
        return (await sync.load(ref, await source.fetch(ref))).route
    except TransferFailed:
        return (await sync.load(ref, await source.from_store(ref))).route


def started() -> InPlace:
    made = InPlace(model=MODEL, dtype="float32", threads=1, deterministic=True)
    asyncio.run(made.start())
    SENT[-1] = {name: perturb(name, values, SEED) for name, values in base().items()}
    return made


def test_transfers_are_drilled_once_and_the_store_is_drilled_only_when_it_is_needed() -> None:
    engine = started()
    trainer, source, sync, told = scene(engine)

    async def load(step: int) -> str:
        ref, SENT[step] = version(step, announced=True)
        route = await loaded(sync, source, ref)
        assert sync.holds == HeldVersion(1, step)
        return route

    assert asyncio.run(load(1)) == asyncio.run(load(2)) == "nccl"
    assert trainer.asked == [-1, 1, 2]
    trainer.away = True
    assert asyncio.run(load(3)) == asyncio.run(load(4)) == "shards"
    trainer.away = False
    assert asyncio.run(load(5)) == "nccl"
    assert [values["route"] for topic, values in told if topic == "drill"] == ["nccl", "shards"]
    assert [values["route"] for topic, values in told if topic == "weights"] == ["nccl"] * 2 + ["shards"] * 2 + ["nccl"]
    whys = [values["why"] for topic, values in told if topic == "weights/transfer" and "why" in values]
    assert set(whys) == {"the trainer is away"}
    asyncio.run(engine.stop())


def test_a_trainer_that_is_absent_at_the_start_causes_drills_of_both_routes() -> None:
    engine = started()
    trainer, source, sync, told = scene(engine)
    trainer.away = True
    ref, SENT[6] = version(6, announced=True)
    assert asyncio.run(loaded(sync, source, ref)) == "shards"
    trainer.away = False
    assert asyncio.run(loaded(sync, source, ref)) == "nccl"
    assert [values["route"] for topic, values in told if topic == "drill"] == ["shards", "nccl"]
    asyncio.run(engine.stop())


def test_every_failed_transfer_is_reported_even_if_the_trainer_answers_slowly(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.telling: weakref.WeakSet[asyncio.Event] = weakref.WeakSet()

        async def call(self, request: Message, *_: object, **__: object) -> Message:
            if isinstance(request, AskTransfer):
                return TransferOffer(communicator=1, number=1, deadline_s=1.0, parameters=[])
            never = asyncio.Event()  # Only its waiter references the event.
            self.telling.add(never)
            await never.wait()
            return Ack()

    class Breaking:
        ranks = 1

        async def receive(self, offer: TransferOffer, meeting: Meeting) -> None:
            raise OSError("broken")

        def broken_off(self, why: str) -> Exception:
            return TransferFailed(why)

        def leave(self) -> None: ...

    async def scenario() -> None:
        trainer, ref = Slow(), version(1, announced=True)[0]
        run = RunDir(tmp_path, tmp_path, tmp_path)
        transfers = EngineTransfers(run, cast(Client, trainer), instance=0, incarnation=1, deadline_s=1.0)
        for told in (1, 2):
            with pytest.raises(TransferFailed, match="broken"):
                await transfers.bring(ref, Breaking(), drill=False)
            await asyncio.sleep(0.01)
            gc.collect()
            assert len(trainer.telling) == told

    asyncio.run(scenario())


def test_the_service_and_the_engine_make_progress_during_the_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, heard = started(), threading.Event()

    def slow(name: str, values: Array, seed: int, factor: float) -> Array:
        assert heard.wait(10), "the event loop is blocked"
        return perturb(name, values, seed, factor)

    monkeypatch.setattr(weights_source, "perturb", slow)

    async def scenario() -> int:
        before = engine.progress
        making = asyncio.create_task(own_drill(engine, version(1, announced=True)[0]))
        await asyncio.sleep(0.1)
        heard.set()
        made = await making
        assert isinstance(made, Arrays)
        assert made.weights.keys() == base().keys()
        return engine.progress - before

    assert asyncio.run(scenario()) >= len(base())
    asyncio.run(engine.stop())


def test_an_engine_waits_only_once_for_a_slow_drill_of_the_trainer() -> None:
    engine = started()
    trainer, source, sync, told = scene(engine)
    trainer.drill_is_made = False
    ref, SENT[8] = version(8, announced=True)
    assert asyncio.run(loaded(sync, source, ref)) == "shards"
    assert trainer.asked == [-1]
    trainer.drill_is_made = True
    ref, SENT[9] = version(9, announced=True)
    assert asyncio.run(loaded(sync, source, ref)) == "nccl"
    assert trainer.asked == [-1, -1, 9]
    assert [values["route"] for topic, values in told if topic == "drill"] == ["shards", "nccl"]
    asyncio.run(engine.stop())


def test_a_route_that_misses_a_parameter_is_found_by_its_own_drill() -> None:
    engine = started()
    engine.deaf = "model.layers.2.self_attn.k_norm.weight"
    trainer, source, sync, _ = scene(engine)
    ref, SENT[7] = version(7, announced=True)
    delivery = asyncio.run(source.fetch(ref))
    with pytest.raises(RpcError, match=r"start-up drill \(seed 7, by nccl\): 1 of 46 .*k_norm"):
        asyncio.run(sync.load(ref, delivery))
    assert sync.holds == HeldVersion()
    trainer.away = True  # The route through the store reaches every parameter.
    assert asyncio.run(loaded(sync, source, ref)) == "shards"
    asyncio.run(engine.stop())
