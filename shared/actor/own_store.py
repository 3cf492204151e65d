"""Finds the batch store that a service puts into: that of its own host, because a put is written into shared memory."""

from __future__ import annotations

import asyncio

from proto.messages import ErrorCode, GetStatus, Status
from shared.actor.service import CALL_S, Service
from shared.rpc.errors import RpcError
from shared.rundir import service_name

STORE = "batch-store"
WAIT_S = 60.0
"""A host that joins may start its services in any order."""
RETRY_S = 0.5


async def own_store(service: Service, placed: str) -> str:
    """`placed`, where the topology puts the stores; on a host that joined the run, the store that registered from it.

    Raises RpcError(missing) when none does within `WAIT_S`.
    """
    if not service.run.scheduler:
        return placed
    loop = asyncio.get_running_loop()
    until = loop.time() + WAIT_S
    while True:
        status = await service.scheduler.call(GetStatus(), Status, deadline_s=CALL_S)
        for row in status.services:
            if row.service == STORE and (await service.resolve(STORE, row.instance)).host_id == service.run.host_id:
                return service_name(STORE, row.instance)
        if loop.time() >= until:
            raise RpcError(
                ErrorCode.MISSING,
                f"{service.name}: no batch-store runs on this host; start one: python -m services.batch_store "
                f"--run {service.run.path} --instance N --listen tcp://ADDRESS:0",
            )
        await asyncio.sleep(RETRY_S)
