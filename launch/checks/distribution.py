"""Fetches the model and the data of a run from home before any process of the run starts on this host.

The files stay in the folder of this host. Existing contents are compared with the digests of home's files, and only
what is missing or different is fetched, so an interrupted transfer continues where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from proto.ids import make_task_id, new_incarnation
from proto.messages import ErrorCode, Hold, PutTask, Resolve, Resolved
from services.batch_store.relay import Relay
from shared.dataplane.stream import StreamReader
from shared.rpc.client import Client, Directory
from shared.rpc.errors import AWAY, RpcError
from shared.rundir import parse_service_name
from shared.security.access import Access
from shared.topology import TRAINER_STORE, distribution, document
from shared.topology.distribution import DistributedFile
from shared.topology.fields import format_size

HOME_S = 120.0
"""Maximum time, in seconds, that a host waits for home's scheduler and store."""
CALL_S = 5.0
RETRY_S = 0.5
LOOK_S = 0.2


async def take(access: Access, folder: Path, host: str, is_over: Callable[[], bool]) -> Access:
    """Return `access` with a topology that names files in `folder`, once those files are there and verified.

    Raises RpcError: bad_request if the disk has no room for the files, or draining once `is_over` returns True.
    """
    data = document.plain(access.topology)
    taking = asyncio.ensure_future(_take(access, data, folder, host))
    while not taking.done():
        await asyncio.wait({taking}, timeout=LOOK_S)
        if is_over() and not taking.done():
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            raise RpcError(ErrorCode.DRAINING, f"host {host}: stopped before it had received the run's files")
    taking.result()
    text = document.dump(distribution.relocated(data, folder))
    return dataclasses.replace(access, topology=text)


async def _take(access: Access, data: dict[str, Any], folder: Path, host: str) -> None:
    log = structlog.get_logger("distribution")
    async with _home(access) as store:
        paths: dict[str, Path] = {}

        async def begin(_: str, nbytes: int, task: PutTask) -> str:
            _resize(paths[task.task_id], nbytes)
            return str(paths[task.task_id])

        async def seal(_: str) -> None:
            """Leave the file as it is."""

        relay = Relay(
            f"host {host}",
            lambda _: store,
            StreamReader(lambda _: store, plain=not data["transport"]["encrypt_bulk"]),
            begin=begin,
            seal=seal,
            abandon=lambda _: None,
            on_progress=lambda: None,
            continues=True,
        )
        try:

            async def file(index: int, path: Path) -> None:
                task = PutTask(make_task_id(distribution.SPLIT, 0, index), 0)
                paths[task.task_id] = path
                await _whole(relay, task)

            await file(0, folder / "list.json")
            rows = msgspec.json.decode((folder / "list.json").read_bytes(), type=list[DistributedFile])
            _check_room(folder, rows, host)
            for index, row in enumerate(rows, 1):
                path = distribution.inside(folder, row)
                if row.nbytes:
                    await file(index, path)
                else:
                    _resize(path, 0)
            log.info("files taken from home", files=len(rows), bytes=sum(row.nbytes for row in rows))
        finally:
            await relay.close()


async def _whole(relay: Relay, task: PutTask) -> None:
    """Return once the whole file is here. Home may need time to start."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HOME_S
    most = 0
    while True:
        try:
            state = await relay.hold(Hold(task=task, origin=TRAINER_STORE, whole=True))
        except RpcError as error:
            if error.code not in AWAY or loop.time() > until:
                raise
            await asyncio.sleep(RETRY_S)
            continue
        if state.held_bytes == state.total_bytes:
            return
        if state.held_bytes > most:
            most, until = state.held_bytes, loop.time() + HOME_S


def _resize(path: Path, nbytes: int) -> None:
    """Give a file its final size. Existing contents are kept up to that size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.ftruncate(file.fileno(), nbytes)


def _check_room(folder: Path, rows: list[DistributedFile], host: str) -> None:
    """Raise RpcError(bad_request) if the disk has no room for the rest of the files."""
    here = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    missing = sum(row.nbytes for row in rows) - here
    free = shutil.disk_usage(folder).free
    if missing > free:
        text = (
            f"host {host}: policy.distribute: {folder} needs {format_size(missing)} more for the model and the data, "
            f"but the disk has {format_size(free)}; make room, or name another folder with --run-dir"
        )
        raise RpcError(ErrorCode.BAD_REQUEST, text)


@contextlib.asynccontextmanager
async def _home(access: Access) -> AsyncIterator[Client]:
    """Connect to home's store at the endpoint that home's scheduler reports."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    life = new_incarnation()
    scheduler = Client(context, access.endpoints["scheduler"], "scheduler/0", life, keys=access.keys)
    store = Client(context, "", TRAINER_STORE, life, keys=access.keys)

    async def find(service: str, instance: int) -> str:
        request = Resolve(service=service, instance=instance)
        return (await scheduler.call(request, Resolved, deadline_s=CALL_S)).endpoint

    directory = Directory(find)
    directory.follow(*parse_service_name(TRAINER_STORE), store)
    try:
        yield store
    finally:
        await directory.close()
        store.close()
        scheduler.close()
        await asyncio.to_thread(context.term)
