"""Tests a service on a joined host, which needs that host's store for as long as it puts shards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from proto.messages import ErrorCode, Resolved
from shared.actor import own_store
from shared.actor.own_store import own_store_stays
from shared.actor.service import Service
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rundir import RunDir

STORE = "batch-store/1"


def service(folder: Path, scheduler: str, answers: Iterator[RpcError | None]) -> Service:
    async def resolve(service: str, instance: int) -> Resolved:
        assert (service, instance) == ("batch-store", 1)
        answer = next(answers)
        if answer is not None:
            raise answer
        return Resolved(endpoint="tcp://there", host_id="away", incarnation=1)

    run = RunDir(folder, folder, folder, scheduler)
    return cast(Service, SimpleNamespace(run=run, name="rollout/1", resolve=resolve))


def test_a_service_fails_with_an_error_that_names_the_remedy_once_the_scheduler_has_given_up_on_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_store, "LOOK_S", 0.001)
    gone = RpcError(ErrorCode.MISSING, "batch-store/1 has not registered (yet)")
    answers = iter([None, DeadlineExceeded("the scheduler is away"), None, gone])
    joined = service(tmp_path, "tcp://home", answers)
    with pytest.raises(RpcError, match="rollout/1: batch-store/1 of this host is gone; start one: python") as caught:
        asyncio.run(asyncio.wait_for(own_store_stays(joined, STORE), 10))
    assert caught.value.code == ErrorCode.MISSING
    assert not list(answers)


def test_a_service_waits_for_a_store_that_the_topology_places(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(own_store_stays(service(tmp_path, "", iter([])), STORE), 10))
