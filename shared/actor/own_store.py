"""Finds the batch store on a service's own host. A put is written into shared memory, so the store must be local. A
service stops once its store is gone for good, because it would otherwise lease tasks whose results it could not store.
"""

from __future__ import annotations

import asyncio

from proto.messages import ErrorCode, GetStatus, Status
from shared.actor.service import CALL_S, Service
from shared.rpc.errors import RpcError
from shared.rundir import parse_service_name, service_name
from shared.topology import TRAINER_STORE

STORE = "batch-store"
WAIT_S = 60.0
"""Maximum time, in seconds, to wait for the store: a joining host may start its services in any order."""
RETRY_S = 0.5
LOOK_S = 5.0


async def own_store(service: Service) -> str:
    """Return the name of the store for this service's puts: the trainer's store on the run's own host, and this host's
    store elsewhere.

    Raises RpcError(missing) if this host's store does not register within `WAIT_S` seconds.
    """
    if not service.run.scheduler:
        return TRAINER_STORE
    loop = asyncio.get_running_loop()
    until = loop.time() + WAIT_S
    while True:
        status = await service.scheduler.call(GetStatus(), Status, deadline_s=CALL_S)
        for row in status.services:
            if row.service == STORE and (await service.resolve(STORE, row.instance)).host_id == service.run.host_id:
                return service_name(STORE, row.instance)
        if loop.time() >= until:
            raise _missing(service, "no batch-store is running on this host")
        await asyncio.sleep(RETRY_S)


async def own_store_stays(service: Service, store: str) -> None:
    """Watch the store on a host that has joined; run this coroutine with `Service.keep`. On the run's own host, where
    the supervisor restarts the store, return at once.

    Raises RpcError(missing) once the scheduler has given up on `store`.
    """
    while service.run.scheduler:
        await asyncio.sleep(LOOK_S)
        try:
            await service.resolve(*parse_service_name(store))
        except RpcError as error:
            if error.code == ErrorCode.MISSING:
                raise _missing(service, f"{store} of this host is gone") from None


def _missing(service: Service, what: str) -> RpcError:
    return RpcError(
        ErrorCode.MISSING,
        f"{service.name}: {what}; start one: python -m services.batch_store --run {service.run.path} --instance N "
        "--listen tcp://ADDRESS:0; then start this service again",
    )
