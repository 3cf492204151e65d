"""Fetches the logs of services that the supervisor did not start, because they run on a host that has joined the run.

Each service is asked for its own log. No name received from another host is turned into a path here.
"""

from __future__ import annotations

import zmq

from proto.messages import ErrorCode, GetLog, LogLines, Resolve, Resolved
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.security.curve import is_tcp
from shared.security.keys import Keyring

CALL_S = 1.0
"""Maximum time, in seconds, for one call. Two calls fit into the time that `ctl` waits for the supervisor."""


async def log_of_joined(
    request: GetLog, scheduler: Client, context: zmq.Context[zmq.Socket[bytes]], incarnation: int, keys: Keyring | None
) -> LogLines:
    """Return the log of the service named in `request`. `keys` is None if the run does not reach other hosts.

    Raises RpcError: bad_request if no such service has registered, deadline if it does not answer.
    """
    name = service_name(request.service, request.instance)
    try:
        ask = Resolve(service=request.service, instance=request.instance)
        where = await scheduler.call(ask, Resolved, deadline_s=CALL_S)
    except RpcError:
        raise RpcError(ErrorCode.BAD_REQUEST, f"no service {name}") from None
    remote = is_tcp(where.endpoint)
    if not where.endpoint or (remote and keys is None):
        raise RpcError(ErrorCode.BAD_REQUEST, f"{name} cannot be asked for its log: this host cannot reach it")
    client = Client(context, where.endpoint, name, incarnation, keys=keys if remote else None)
    try:
        return await client.call(request, LogLines, deadline_s=CALL_S)
    finally:
        client.close()
