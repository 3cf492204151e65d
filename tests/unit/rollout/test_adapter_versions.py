"""Tests that a lease with a newer adapter does not wait for the end of the leases that are being sampled."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from proto.messages import WeightsRef
from services.rollout.engine import Generation, Prompt, SamplingParams
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.versions import EngineVersions
from shared.actor.telemetry import TelemetrySender
from shared.colocation.turns import OwnDevices
from shared.lease import Lease, LeaseBook
from shared.topology.lora import live_adapters
from shared.topology.passes import FASTEST
from tests.unit.rollout.adapter_trainer import START, Published
from tests.unit.rollout.rollout_engine import MODEL
from tests.unit.rollout.versions_rig import lease

pytestmark = pytest.mark.slow


def leased(task: str, ref: WeightsRef) -> Lease:
    return Lease(structs.replace(lease([task]).grant, weights=ref, min_step=ref.step), lambda: 0)


def test_a_lease_with_a_newer_adapter_is_sampled_beside_one_with_an_older_adapter(tmp_path: Path) -> None:
    published = Published(tmp_path)
    asyncio.run(_beside(published))


async def _beside(published: Published) -> None:
    old, new, newest = published.refs[1:]
    engine = TransformersEngine(
        model=MODEL,
        dtype="float32",
        threads=1,
        deterministic=False,
        passes=FASTEST,
        adapter=START,
        live=live_adapters("wait", None),
    )
    await engine.start()
    source = WeightsSource(published, emit=lambda topic, values: None)  # type: ignore[arg-type]
    service = SimpleNamespace(telemetry=TelemetrySender("rollout", 0, 1))
    versions = EngineVersions(
        LeaseBook(service, "rollout", lambda: engine.progress),  # type: ignore[arg-type]
        engine=engine,
        sync=WeightsSync(engine, "rollout/0", lambda topic, values: None, source),
        source=source,
        turns=OwnDevices(),
        emit=lambda topic, values: None,
        in_flight=False,
    )

    async def sampled(swaps: int, tokens: int) -> Generation:
        params = SamplingParams(1, 3.0, tokens, 5, swaps=swaps, ends=False)
        ((made,),) = await engine.generate([Prompt("train/0/0", [5, 6, 7, 8])], params, threading.Event())
        return made

    async with versions.bring(leased("train/0/0", old), exact=False) as first:
        alone = (await sampled(first.began, 300)).token_ids.tolist()
        running = asyncio.create_task(sampled(first.began, 300))
        async with versions.bring(leased("train/0/1", new), exact=False) as second:
            assert not running.done()
            assert second.first == new.step > first.first
            beside = await sampled(second.began, 20)
            assert set(beside.swaps.tolist()) == {second.began}
            made = await running
            assert made.token_ids.tolist() == alone
            assert set(made.swaps.tolist()) == {first.began}
            assert beside.token_ids.tolist() != alone[:20]
            # Two adapters are alive at most, so a third waits for the end of a lease.
            third = asyncio.create_task(_brought(versions, leased("train/0/2", newest)))
            await asyncio.sleep(0.05)
            assert not third.done()
    assert await third == newest.step
    await engine.stop()


async def _brought(versions: EngineVersions, wanted: Lease) -> int:
    async with versions.bring(wanted, exact=False) as begun:
        return begun.first
