"""The page's calls to the supervisor: process states, and commands from visitors who have the operator token."""

from __future__ import annotations

import zmq

from proto.ids import new_incarnation
from proto.messages import Ack, DrainService, ErrorCode, GetSupervisorState, RestartService, SupervisorState
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name

DEADLINE_S = 5.0
STATE_DEADLINE_S = 2.0


class SupervisorCalls:
    """Calls to the supervisor of a run on this host."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunDir) -> None:
        self._client = Client(context, run.endpoint("supervisor", 0), "supervisor/0", new_incarnation())

    async def state(self) -> SupervisorState:
        """Return the processes of the run. Raises RpcError."""
        return await self._client.call(GetSupervisorState(), SupervisorState, deadline_s=STATE_DEADLINE_S)

    async def act(self, action: str, name: str) -> None:
        """Restart or drain `NAME` or `NAME/INSTANCE`. Raises RpcError."""
        service, instance = parse_service_name(name)
        match action:
            case "restart":
                await self._client.call(RestartService(service=service, instance=instance), Ack, deadline_s=DEADLINE_S)
            case "drain":
                await self._client.call(DrainService(service=service, instance=instance), Ack, deadline_s=DEADLINE_S)
            case _:
                raise RpcError(ErrorCode.BAD_REQUEST, f"{action[:20]!r}: not an action; use restart or drain")

    def close(self) -> None:
        self._client.close()
