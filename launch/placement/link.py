"""Joins the run on behalf of a host's agent, reports to the run, and has the host's supervisor run the processes that
the run orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog
import zmq

from launch.placement.facts import clock_ahead
from launch.supervisor.plan import SUPERVISOR, Key
from launch.supervisor.server import Supervisor
from proto.messages import Ack, ErrorCode, HostCheck, HostFacts, HostOrders, HostProcess, HostReport, Ping, Pong
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.security.access import Access

REPORT_S = 1.0
CALL_S = 5.0
LAST_CALL_S = 2.0
ALONE_S = 60.0
"""Seconds without an answer from the run after which an agent kills everything on its host."""


class HostLink:
    """The connection from a host's agent to the run's supervisor, for one incarnation of the agent."""

    def __init__(self, access: Access, host: str, names: Sequence[str], incarnation: int) -> None:
        """`names` are the GPUs that the agent may use, as CUDA_VISIBLE_DEVICES names them."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        endpoint = access.endpoints[SUPERVISOR]
        self._client = Client(self._context, endpoint, f"{SUPERVISOR} at {endpoint}", incarnation, keys=access.keys)
        self._names = list(names)
        self._report = HostReport(host=host, incarnation=incarnation, endpoint="", gpus=len(self._names), processes=[])
        self._ordered: set[Key] = set()
        self._log = structlog.get_logger("host")
        self.given_up = False
        """Whether the run considers this incarnation of the agent lost, so that the agent must join again under a new
        one."""

    async def introduce(self, there: HostFacts) -> None:
        """Ask home whether a host with the facts `there` can take part. Raises RpcError(bad_request) if it cannot."""
        sent_at = time.time()
        home = await self._client.call(Ping(), Pong, deadline_s=CALL_S)
        facts = msgspec.structs.replace(there, clock_s=-clock_ahead(sent_at, home.at, time.time()))
        await self._client.call(HostCheck(host=self._report.host, facts=facts), Ack, deadline_s=CALL_S)

    async def join(self) -> HostOrders:
        """Report for the first time, and return the orders. Raises RpcError."""
        orders = await self._client.call(self._report, HostOrders, deadline_s=CALL_S)
        self._ordered = {(each.service, each.instance) for each in orders.processes}
        return orders

    def gpus_of(self, process: HostProcess) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES for a process."""
        return ",".join(self._names[gpu] for gpu in process.gpus)

    async def follow(self, supervisor: Supervisor) -> None:
        """Report and carry out the orders until cancelled."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            await asyncio.sleep(REPORT_S)
            try:
                orders = await self._send(supervisor, CALL_S)
            except RpcError as error:
                if error.code == ErrorCode.LOST:
                    self.given_up = True
                    supervisor.kill(str(error))
                elif error.code == ErrorCode.BAD_REQUEST:
                    supervisor.kill(str(error))
                elif loop.time() - heard_at > ALONE_S:
                    supervisor.kill(f"the run has not answered for {ALONE_S:g} s: {error}")
                continue
            heard_at = loop.time()
            self._obey(supervisor, orders)

    async def end(self, supervisor: Supervisor, failed: str) -> None:
        """Tell the run that everything on this host has ended. `failed` is the cause of a failure, or empty."""
        try:
            if failed:
                await self._send(supervisor, LAST_CALL_S, failed=failed)
            await self._send(supervisor, LAST_CALL_S, ended=True)
        except RpcError as error:
            self._log.warning("the run was not told that this host has ended", error=str(error))

    async def close(self) -> None:
        self._client.close()
        await asyncio.to_thread(self._context.term)

    async def _send(
        self, supervisor: Supervisor, deadline_s: float, *, failed: str = "", ended: bool = False
    ) -> HostOrders:
        report = msgspec.structs.replace(
            self._report, endpoint=supervisor.door, processes=supervisor.rows(), ended=ended, failed=failed
        )
        return await self._client.call(report, HostOrders, deadline_s=deadline_s)

    def _obey(self, supervisor: Supervisor, orders: HostOrders) -> None:
        if orders.ends:
            supervisor.stop("the run ends")
            return
        wanted = {(each.service, each.instance): each for each in orders.processes}
        for key in wanted.keys() - self._ordered:
            self._log.info("ordered", service=key[0], instance=key[1])
            supervisor.add(key, wanted[key].threads, self.gpus_of(wanted[key]))
        gone = self._ordered - wanted.keys()
        if gone:
            supervisor.drain(sorted(gone))
        self._ordered = set(wanted)
