"""Asks one service of a run one thing, from a short-lived process. Never waits longer than its deadline."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import zmq

from proto.ids import new_incarnation
from proto.messages import ErrorCode
from proto.registry import Message, Request
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rundir import RunDir, service_name

R = TypeVar("R", bound=Message)
DEADLINE_S = 3.0


async def with_client(run: RunDir, service: str, request: Request, reply: type[R], deadline_s: float = DEADLINE_S) -> R:
    """The reply of instance 0 of `service`. Raises RpcError; code `deadline` when it is not there."""
    if not run.socket_file(service, 0).exists():
        raise RpcError(ErrorCode.DEADLINE, f"run {run.path}: no {service} is running")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    client = Client(context, run.endpoint(service, 0), service_name(service, 0), new_incarnation())
    try:
        return await client.call(request, reply, deadline_s=deadline_s)
    except DeadlineExceeded:
        raise RpcError(ErrorCode.DEADLINE, f"run {run.path}: {service} does not answer in {deadline_s:g} s") from None
    finally:
        client.close()
        await asyncio.get_running_loop().run_in_executor(None, context.term)
