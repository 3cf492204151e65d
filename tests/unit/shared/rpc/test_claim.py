"""Each endpoint has one owner at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto.messages import (
    GetInventory,
    Inventory,
)
from shared.rpc.errors import RpcError
from tests.unit.shared.rpc.rpc_actors import (
    DEADLINE_S,
    asking,
    double,
    line_of,
    process,
    serving,
)


def test_second_owner_of_an_endpoint_is_refused_with_a_one_line_error_and_the_first_continues(ipc: str) -> None:
    async def main() -> None:
        path = Path(ipc.removeprefix("ipc://"))
        async with serving(ipc, (GetInventory, double)) as (_, bound), asking(bound) as client:
            with pytest.raises(RpcError, match=r"^echo/0: ipc://.*/echo-0 is in use by a live process; .*$"):
                async with serving(ipc):
                    pass
            assert (await client.call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S)).cursor == 2
        assert list(path.parent.iterdir()) == []
        with process("mailbox", ipc) as server:
            assert line_of(server) == "bound"
            with pytest.raises(RpcError, match="in use"):
                async with serving(ipc):
                    pass
            server.kill()
            server.wait(10)
        async with serving(ipc, (GetInventory, double)) as (_, bound), asking(bound) as client:
            assert (await client.call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S)).cursor == 2
        assert list(path.parent.iterdir()) == []

    asyncio.run(main())


def test_quick_change_of_owner_never_deletes_the_new_owners_socket(ipc: str) -> None:
    """libzmq unlinks the path of a socket some time after the socket is closed; this must not delete the next owner's
    file."""

    async def main() -> None:
        for _ in range(20):
            async with serving(ipc, (GetInventory, double)) as (mailbox, _):
                await mailbox.close()
                async with serving(ipc, (GetInventory, double)) as (_, bound), asking(bound) as client:
                    answer = await client.call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S)
                    assert answer.cursor == 2

    asyncio.run(main())


def test_tcp_port_in_use_and_missing_folder_give_one_line_errors() -> None:
    async def main() -> None:
        async with serving("tcp://127.0.0.1:*") as (_, bound):
            with pytest.raises(RpcError, match=r"echo/0: cannot bind tcp://127.0.0.1:\d+: Address already in use"):
                async with serving(bound):
                    pass
        with pytest.raises(RpcError, match="echo/0: cannot bind ipc:///nowhere/x: No such file"):
            async with serving("ipc:///nowhere/x"):
                pass

    asyncio.run(main())
