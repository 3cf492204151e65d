"""Tests fetches from one or two stores while a store dies, fails or stays silent. A fetch returns all of the data or
raises a named error; it never returns only part of the data.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import Ack, BatchMeta, BatchPart, Clear, ErrorCode, Locate, PutTask, TaskHandle
from shared.dataplane import client as data_client
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from tests.integration.store_process import STORE, Peer, StoreProcess, make_run, peer_of
from tests.integration.stream_line import TcpStoreProcess

MEMORY = 64 << 20
CALL_S = 20.0
PAGE = 64
TASKS = 4 * PAGE


class Interrupted:
    """A bus client that interrupts its store after the reply to the first `Locate`.

    After the interruption, the fetch uses that reply and requests the remaining tasks.
    """

    def __init__(self, client: Client, interrupt: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._interrupt = interrupt
        self._over = asyncio.Event()
        self.locates = 0

    async def call(self, request: Any, reply: Any, *, deadline_s: float) -> Any:
        """Forward the request as `Client.call` does, and interrupt the store after the first `Locate`."""
        if not isinstance(request, Locate):
            return await self._client.call(request, reply, deadline_s=deadline_s)
        self.locates += 1
        if self.locates > 1:
            await self._over.wait()
            return await self._client.call(request, reply, deadline_s=deadline_s)
        answer = await self._client.call(request, reply, deadline_s=deadline_s)
        await self._interrupt()
        self._over.set()
        return answer


def test_a_fetch_interrupted_after_the_first_reply_returns_whole_data_or_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_client, "LOCATE_TASKS", PAGE)
    store = TcpStoreProcess(make_run(tmp_path, memory=MEMORY))
    tasks = [TaskShards(f"train/0/{i}", 1, {"a": np.full(100, i)}) for i in range(TASKS)]
    handles = [TaskHandle(task.task_id, 1, stores=[0]) for task in tasks]
    meta = BatchMeta(tasks=handles, parts=[BatchPart("s", ["a"])], stores=[STORE])

    async def fetch(peer: Peer, interrupt: Callable[[], Awaitable[None]], deadline_s: float = CALL_S) -> None:
        """Fetch everything that was put, and check it. Errors raised by the fetch propagate."""
        client = Interrupted(peer.store, interrupt)
        data = DataClient(lambda service, instance: client)  # type: ignore[arg-type,return-value]
        try:
            found = await data.fetch(meta, ["a"], deadline_s=deadline_s)
        finally:
            data.close()
        assert client.locates == TASKS // PAGE
        assert [int(each["a"].sum()) for each in found] == [100 * i for i in range(TASKS)]

    def restart(defect: str = "") -> None:
        store.kill()
        store.defect = defect
        store.start()

    async def dies() -> None:
        restart()

    async def errs() -> None:
        restart("services.batch_store.state:StoreState.locate")

    async def main() -> None:
        async with peer_of(store.run) as peer:

            async def collects() -> None:
                first = [PutTask(task.task_id, 1) for task in tasks[:PAGE]]
                await peer.store.call(Clear(tasks=first), Ack, deadline_s=CALL_S)

            async def is_gone() -> None:
                store.kill()

            for first in range(0, TASKS, PAGE):
                await peer.data.put(tasks[first : first + PAGE], store=STORE, deadline_s=CALL_S)
            await fetch(peer, dies)
            with pytest.raises(RpcError, match=r"batch-store/0.*KeyError.*planted") as caught:
                await fetch(peer, errs)
            assert caught.value.code == ErrorCode.INTERNAL
            restart()
            with pytest.raises(DeadlineExceeded, match="batch-store/0"):
                await fetch(peer, is_gone, deadline_s=1.0)
            store.start()
            with pytest.raises(RpcError, match="64 of 64 tasks were collected: train/0/0,") as caught:
                await fetch(peer, collects)
            assert caught.value.code == ErrorCode.COLLECTED
            assert caught.value.names == [task.task_id for task in tasks[:PAGE]]

    store.start()
    try:
        asyncio.run(main())
    finally:
        if store.process is not None and store.process.poll() is None:
            store.kill()
        store.run.remove_volatile()


class Counting:
    """A bus client that counts its requests by type, and counts the tasks that it asks its store to locate."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.requests: Counter[str] = Counter()
        self.tasks = 0

    async def call(self, request: Any, reply: Any, *, deadline_s: float) -> Any:
        """Count the request, and forward it as `Client.call` does."""
        self.requests[type(request).__name__] += 1
        if isinstance(request, Locate):
            self.tasks += len(request.tasks)
        return await self._client.call(request, reply, deadline_s=deadline_s)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[StoreProcess]]:
    run = make_run(tmp_path, memory=MEMORY)
    made = [StoreProcess(run, instance=instance) for instance in (0, 1)]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.kill()
    run.remove_volatile()


def test_one_batch_is_read_from_two_stores_with_one_request_each(stores: list[StoreProcess]) -> None:
    names = [STORE, "batch-store/1"]
    tasks = [TaskShards(f"train/0/{i}", 1, {"a": np.full(50, i), "b": np.full(3, -i)}) for i in range(40)]
    handles = [TaskHandle(task.task_id, 1, stores=[i % 2]) for i, task in enumerate(tasks)]
    meta = BatchMeta(tasks=handles, parts=[BatchPart("s", ["a", "b"])], stores=names)

    async def main() -> None:
        async with peer_of(stores[0].run, 0) as even, peer_of(stores[1].run, 1) as odd:
            clients = [Counting(even.store), Counting(odd.store)]
            data = DataClient(lambda service, instance: clients[instance])  # type: ignore[arg-type,return-value]

            async def fetch(deadline_s: float = CALL_S) -> None:
                found = await data.fetch(meta, ["b", "a"], deadline_s=deadline_s)
                assert [(int(each["a"][-1]), int(each["b"][-1])) for each in found] == [(i, -i) for i in range(40)]
                assert all(list(each) == ["b", "a"] for each in found)

            for number, name in enumerate(names):
                await data.put(tasks[number::2], store=name, deadline_s=CALL_S)
            await fetch()
            assert [client.requests["Locate"] for client in clients] == [1, 1]
            assert [client.tasks for client in clients] == [20, 20]
            assert [client.requests["OpenStream"] for client in clients] == [0, 0]
            assert stores[1].process is not None
            # A task requested from the wrong store is missing, and the error names it.
            wrong = BatchMeta(
                tasks=[handles[2], TaskHandle("train/0/4", 1, stores=[1])], parts=meta.parts, stores=names
            )
            with pytest.raises(RpcError, match=r"batch-store/1.*train/0/4#a") as caught:
                await data.fetch(wrong, ["a"], deadline_s=CALL_S)
            assert (caught.value.code, caught.value.names) == (ErrorCode.MISSING, ["train/0/4#a"])
            # A slow store delays the fetch. A dead store makes it fail with an error that names the store.
            stores[1].process.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded, match="batch-store/1"):
                await fetch(deadline_s=0.5)
            late = asyncio.ensure_future(fetch())
            await asyncio.sleep(0.3)
            assert not late.done()
            stores[1].process.send_signal(signal.SIGCONT)
            await late
            stores[1].kill()
            with pytest.raises(DeadlineExceeded, match="batch-store/1"):
                await fetch(deadline_s=0.5)
            data.close()

    asyncio.run(main())
