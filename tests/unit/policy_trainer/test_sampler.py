"""Tests what a sampler does when every engine that seems to be there has died for good."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from proto.messages import Ack, ErrorCode, LoadVersion
from services.policy_trainer.sampling import sampler as samplers
from services.policy_trainer.sampling.request import SamplingRequest
from services.policy_trainer.sampling.router import EngineSeen
from services.policy_trainer.sampling.sampler import Sampler
from shared.rpc.errors import RpcError
from tests.unit.tinker.workers import reference


class Dead:
    """The connection to an engine that has died."""

    peer = "rollout/0"

    async def call(self, *_: Any, **__: Any) -> Any:
        raise RpcError(ErrorCode.LOST, "rollout/0 is gone")


class Fresh:
    """The connection to an engine that has just started. It has no version; once it has one, it refuses to sample."""

    peer = "rollout/0"
    loaded = False

    async def call(self, request: Any, *_: Any, **__: Any) -> Any:
        if isinstance(request, LoadVersion):
            self.loaded = True
            return Ack()
        raise RpcError(ErrorCode.GONE if self.loaded else ErrorCode.MISSING, "no")


class Packs:
    async def pack(self, arrays: Any) -> Any:
        return None


def test_a_sample_of_the_base_waits_until_the_base_is_published() -> None:
    async def scenario() -> None:
        engine, data = Fresh(), cast(Any, None)
        made = Sampler(lambda *_: engine, data, incarnation=1, store="batch-store/0", engines=1)  # type: ignore[arg-type,return-value]
        made._parcels = Packs()  # type: ignore[assignment]
        made._handle(EngineSeen(0, 7, True))
        sample = asyncio.create_task(made.sample(SamplingRequest(None, np.arange(3, dtype=np.int32), seed=1)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not sample.done()
        assert not engine.loaded
        made.begin(reference("model", 1))
        with pytest.raises(RpcError) as refused:
            await asyncio.wait_for(sample, 10)
        assert engine.loaded
        assert refused.value.code == ErrorCode.GONE

    asyncio.run(scenario())


def test_a_load_ends_with_the_last_error_if_no_engine_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "PATIENCE_S", 0.2)

    async def scenario() -> None:
        data: Any = None
        made = Sampler(lambda *_: Dead(), data, incarnation=1, store="batch-store/0", engines=1)  # type: ignore[arg-type,return-value]
        made._handle(EngineSeen(0, 7, True))
        async with asyncio.timeout(10):
            with pytest.raises(RpcError, match="rollout/0 is gone") as lost:
                await made.load(reference("model", 1))
        assert lost.value.code == ErrorCode.LOST

    asyncio.run(scenario())
