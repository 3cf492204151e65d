"""The supervisor's sockets: its mailbox, its door for other hosts, and its clients of the run's other processes.

The door admits operators and services; the attempts of others are reported to the monitor.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import structlog
import zmq

from launch.processes.plan import SUPERVISOR, Key
from proto.ids import new_incarnation
from proto.messages import GetStatus, Status
from shared.actor.telemetry import TelemetrySender, report_refusals
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Mailbox
from shared.rundir import RunDir, service_name
from shared.security.access import Access
from shared.security.curve import check_listen
from shared.security.keys import Keyring, load
from shared.security.roles import Role
from shared.security.zap import Gate

REPORT_S = 1.0


class SupervisorSockets:
    """The sockets of one supervisor. They belong to the event loop on which they are opened."""

    def __init__(self, run: RunDir, access: Access | None) -> None:
        """`access` provides the run's endpoints and keys to a supervisor on another host."""
        self.run = run
        self.incarnation = new_incarnation()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.mailbox = Mailbox(SUPERVISOR, self.incarnation)
        self.endpoint = ""
        """Endpoint of the mailbox for processes on this host."""
        self.door = ""
        """Endpoint of the door, including its port, or an empty string."""
        self.keys: Keyring | None = None
        """Keys of the run for peers on other hosts, or None if there is no door."""
        self._access = access
        self._clients: dict[str, Client] = {}
        self._closing = AsyncExitStack()

    def open(self, listen: str) -> None:
        """Answer processes on this host, and other hosts at `listen` (`tcp://ADDRESS:PORT`; nowhere if empty).

        Raises RpcError(bad_request) if this host lacks the address, the port is taken, or there are no keys.
        """
        self.endpoint = self.mailbox.bind(self.context, self.run.endpoint(SUPERVISOR, 0))
        gate: Gate | None = None
        if listen:
            check_listen(listen)
            self.keys = load(self.run.keys, Role.SERVICE)
            gate = Gate(self.context, self.keys)
            self._closing.callback(gate.close)
            self.door = self.mailbox.bind(self.context, listen, gate=gate, admits=Role.OPERATOR)
            structlog.get_logger(SUPERVISOR).info("listens", endpoint=self.door)
        telemetry = TelemetrySender(SUPERVISOR, 0, self.incarnation)
        telemetry.connect(self.announced("monitor"))
        self._closing.callback(telemetry.flush)
        reports = asyncio.create_task(
            report_refusals(self.mailbox, gate, telemetry, REPORT_S), name="supervisor refusals"
        )
        self._closing.push_async_callback(asyncio.wait, {reports})
        self._closing.callback(reports.cancel)

    def local(self, key: Key) -> Client:
        """Return the client of a process on this host."""
        return self.client(service_name(*key), self.run.endpoint(*key))

    def announced(self, service: str) -> Client:
        """Return the client of the scheduler or the monitor of the run, which may be on another host."""
        if self._access is None:
            return self.local((service, 0))
        return self.client(service_name(service, 0), self._access.endpoints[service], self._access.keys)

    def client(self, name: str, endpoint: str, keys: Keyring | None = None) -> Client:
        """Return the client of the process `name`, connected to `endpoint`."""
        if name not in self._clients:
            self._clients[name] = Client(self.context, endpoint, name, self.incarnation, keys=keys)
        self._clients[name].connect(endpoint)
        return self._clients[name]

    async def status(self, deadline_s: float) -> Status | None:
        """Return the status of the run, or None if the scheduler does not answer."""
        try:
            return await self.announced("scheduler").call(GetStatus(), Status, deadline_s=deadline_s)
        except RpcError:
            return None

    async def close(self) -> None:
        """Stop answering, and close every socket."""
        await self.mailbox.close()
        await self._closing.aclose()
        for client in self._clients.values():
            client.close()
        await asyncio.get_running_loop().run_in_executor(None, self.context.term)
