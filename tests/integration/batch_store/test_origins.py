"""A store opens a connection only to stores of its run, whatever names its peers give it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from proto.messages import ErrorCode, GetStoreStats, Held, Hold, PutTask, StoreStats
from shared.rpc.errors import RpcError
from tests.integration.store_scheduler import CALL_S, Actor, bench_of, make_run

SOCKETS = 1023
"""Maximum number of sockets of a libzmq context."""
AT_ONCE = 100


async def refusal(actor: Actor, origin: str, step: int = 1, deadline_s: float = CALL_S) -> str:
    """Return the error code of a request for a version that the store would have to fetch from `origin`."""
    request = Hold(task=PutTask(f"weights/0/{step}", 1), origin=origin)
    try:
        await actor.client("batch-store").call(request, Held, deadline_s=deadline_s)
    except RpcError as error:
        return error.code
    return ""


def test_made_up_origins_take_no_sockets_and_real_ones_are_still_reached(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench_of(make_run(tmp_path, store="memory: 1GiB")) as bench:
            actor = await bench.actor("rollout")
            await actor.ask(GetStoreStats(), StoreStats, service="batch-store")
            assert bench.store.process is not None
            before = len(os.listdir(f"/proc/{bench.store.process.pid}/fd"))
            for first in range(1, SOCKETS + AT_ONCE, AT_ONCE):
                names = [f"batch-store/{number}" for number in range(first, first + AT_ONCE)]
                codes = await asyncio.gather(*(refusal(actor, name, step) for step, name in enumerate(names)))
                assert set(codes) == {ErrorCode.NOT_READY}
            for name in ("rollout/0", "batch-store", "batch-store/01", "", "x" * 100_000):
                assert await refusal(actor, name) == ErrorCode.BAD_REQUEST
            assert len(os.listdir(f"/proc/{bench.store.process.pid}/fd")) < before + 20
            # A registered store is asked, although nothing answers in its name.
            await bench.actor("batch-store", 1)
            assert await refusal(actor, "batch-store/1", deadline_s=1.0) == ErrorCode.DEADLINE

    asyncio.run(main())
