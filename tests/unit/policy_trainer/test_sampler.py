"""Tests what a sampler does when every engine that seems to be there has died for good."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proto.messages import ErrorCode
from services.policy_trainer.sampling import sampler as samplers
from services.policy_trainer.sampling.router import EngineSeen
from services.policy_trainer.sampling.sampler import Sampler
from shared.rpc.errors import RpcError
from tests.unit.tinker.workers import reference


class Dead:
    """The connection to an engine that has died."""

    peer = "rollout/0"

    async def call(self, *_: Any, **__: Any) -> Any:
        raise RpcError(ErrorCode.LOST, "rollout/0 is gone")


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
