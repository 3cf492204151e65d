"""The supervisor's socket for other hosts: it admits operators and services and reports other attempts to the monitor.

It does not answer messages itself; the mailbox handles them.
"""

from __future__ import annotations

import asyncio

import structlog
import zmq

from launch.supervisor.plan import SUPERVISOR
from shared.actor.telemetry import TelemetrySender, report_refusals
from shared.rpc.client import Client
from shared.rpc.mailbox import Mailbox
from shared.rundir import RunDir
from shared.security.access import Access
from shared.security.curve import check_listen
from shared.security.keys import Keyring, load
from shared.security.roles import Role
from shared.security.zap import Gate

REPORT_S = 1.0


class SupervisorDoor:
    """The socket and its keys. The object belongs to the event loop that created it. Close it after the mailbox."""

    def __init__(
        self,
        run: RunDir,
        context: zmq.Context[zmq.Socket[bytes]],
        mailbox: Mailbox,
        incarnation: int,
        access: Access | None = None,
    ) -> None:
        """`access` provides the monitor's endpoint and the keys to a supervisor on another host."""
        self._run = run
        self._context = context
        self._mailbox = mailbox
        self.keys: Keyring | None = None
        """Keys of the run for peers on other hosts, or None if the supervisor does not listen for such peers."""
        self._gate: Gate | None = None
        self.endpoint = ""
        """Endpoint for operators and services on other hosts, including its port, or an empty string."""
        where = run.endpoint("monitor", 0) if access is None else access.endpoints["monitor"]
        ring = None if access is None else access.keys
        self._monitor = Client(context, where, "monitor/0", incarnation, keys=ring)
        self._telemetry = TelemetrySender(SUPERVISOR, 0, incarnation)
        self._telemetry.connect(self._monitor)
        self._reports: asyncio.Task[None] | None = None

    def open(self, endpoint: str) -> None:
        """Answer operators at `endpoint` (`tcp://ADDRESS:PORT`; nowhere if empty) and begin to report refusals.

        Raises RpcError(bad_request) if this host lacks the address, the port is taken, or there are no keys.
        """
        if endpoint:
            check_listen(endpoint)
            self.keys = load(self._run.keys, Role.SERVICE)
            self._gate = Gate(self._context, self.keys)
            self.endpoint = self._mailbox.bind(self._context, endpoint, gate=self._gate, admits=Role.OPERATOR)
            structlog.get_logger(SUPERVISOR).info("listens", endpoint=self.endpoint)
        self._reports = asyncio.create_task(
            report_refusals(self._mailbox, self._gate, self._telemetry, REPORT_S), name="supervisor refusals"
        )

    async def close(self) -> None:
        """Stop admitting peers."""
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.gather(self._reports, return_exceptions=True)
        if self._gate is not None:
            self._gate.close()
        self._telemetry.flush()
        self._monitor.close()
