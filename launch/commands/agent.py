"""The agent of a host, which joins a run, reports to it and has the host's supervisor run what the run orders."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog
import zmq

from launch.placement.facts import clock_ahead
from launch.processes.plan import SUPERVISOR, Key, Resources, own_gpus
from launch.spares.processes import spare_kinds
from launch.supervisor.events import RunOutcome
from launch.supervisor.server import Supervisor
from proto.ids import new_incarnation
from proto.messages import Ack, ErrorCode, HostCheck, HostFacts, HostOrders, HostReport, Ping, Pong
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security.access import Access
from shared.topology import Topology

JOIN_S = 60.0
"""Maximum time, in seconds, that an agent keeps trying to join a run that does not answer, or that still has a record
of an earlier agent."""
RETRY_S = 1.0
T = TypeVar("T")
RUN_ENDS = "the run ends"
REPORT_S = 1.0
CALL_S = 5.0
LAST_CALL_S = 2.0
ALONE_S = 60.0
"""Seconds without an answer from the run after which an agent kills everything on its host."""


class HostLink:
    """The connection from a host's agent to the run's supervisor, for one incarnation of the agent."""

    def __init__(self, access: Access, host: str, names: Sequence[str] = (), listen: str = "") -> None:
        """`names` are the GPUs that the agent may use, as CUDA_VISIBLE_DEVICES names them. `listen` is the endpoint at
        which its processes answer other hosts.
        """
        incarnation = new_incarnation()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        endpoint = access.endpoints[SUPERVISOR]
        self._client = Client(self._context, endpoint, f"{SUPERVISOR} at {endpoint}", incarnation, keys=access.keys)
        self._names = list(names)
        self._listen = listen
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

    async def join(self) -> dict[Key, Resources]:
        """Report for the first time, and return the processes to run. Raises RpcError."""
        ordered = self._wanted(await self._client.call(self._report, HostOrders, deadline_s=CALL_S))
        self._ordered = set(ordered)
        return ordered

    def _wanted(self, orders: HostOrders) -> dict[Key, Resources]:
        return {
            (row.service, row.instance): Resources(
                row.threads, ",".join(self._names[gpu] for gpu in row.gpus), self._listen
            )
            for row in orders.processes
        }

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
            self._report,
            endpoint=supervisor.sockets.door,
            processes=supervisor.views.rows(),
            ended=ended,
            failed=failed,
        )
        return await self._client.call(report, HostOrders, deadline_s=deadline_s)

    def _obey(self, supervisor: Supervisor, orders: HostOrders) -> None:
        if orders.ends:
            supervisor.stop(RUN_ENDS)
            return
        wanted = self._wanted(orders)
        for key in wanted.keys() - self._ordered:
            self._log.info("ordered", service=key[0], instance=key[1])
            supervisor.add(key, wanted[key])
        gone = self._ordered - wanted.keys()
        if gone:
            supervisor.drain(sorted(gone))
        self._ordered = set(wanted)


async def answer_to(ask: Callable[[], Awaitable[T]], ends: AgentEnds) -> T:
    """Repeat a request to home for up to JOIN_S seconds, and return the answer. Raises its last RpcError."""
    until = time.monotonic() + JOIN_S
    while True:
        try:
            return await ask()
        except RpcError as error:
            if error.code == ErrorCode.BAD_REQUEST or time.monotonic() >= until or ends.asked:
                raise
            structlog.get_logger("host").warning("not joined yet", error=str(error))
            await asyncio.sleep(RETRY_S)


async def introduce(access: Access, host: str, there: HostFacts, ends: AgentEnds) -> None:
    """Have home decide whether this host can take part. Raises RpcError(bad_request) if it cannot."""
    link = HostLink(access, host)
    try:
        await answer_to(lambda: link.introduce(there), ends)
    finally:
        await link.close()


class AgentEnds:
    """Makes the agent exit after a signal or at the end of its standard input, at any time after its start.

    The first signal drains the host, so that it returns its leases. A second signal or the end of the input kills the
    processes on the host.
    """

    def __init__(self, with_input: bool) -> None:
        self._supervisor: Supervisor | None = None
        self._loop: asyncio.AbstractEventLoop
        self._causes: list[str] = []
        self._killed = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda taken, _: self._ask(signal.Signals(taken).name))
        if with_input:
            threading.Thread(target=self._watch, name="standard input", daemon=True).start()

    @property
    def asked(self) -> bool:
        """Whether the agent has been asked to exit."""
        return bool(self._causes)

    def apply_to(self, supervisor: Supervisor) -> None:
        """Stop `supervisor` as soon as there is a reason for the agent to exit; there may be one already.

        Called on the supervisor's event loop.
        """
        self._loop = asyncio.get_running_loop()
        self._supervisor = supervisor
        self._act()

    def _watch(self) -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        self._killed = True
        self._ask("the end of standard input")

    def _ask(self, cause: str) -> None:
        self._causes.append(cause)
        if self._supervisor is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        if self._supervisor is None or not self._causes:
            return
        if self._killed or len(self._causes) > 1:
            self._supervisor.kill(self._causes[-1])
        else:
            self._supervisor.stop(self._causes[0])


async def live(
    run: RunDir, access: Access, topology: Topology, host: str, address: str, lock: int, ends: AgentEnds
) -> bool | None:
    """Take part in the run as `host`, which other hosts reach at `address`.

    Return whether the run has ended, or None if the host must join again.
    """
    listen = f"tcp://{address}:0"
    link = HostLink(access, host, own_gpus(), listen)
    try:
        ordered = await answer_to(link.join, ends)
        supervisor = Supervisor(
            run,
            ordered,
            start_limit_s=topology.run.start_limit_s,
            on_event=lambda event: None,
            listen=listen,
            lock=lock,
            spares=spare_kinds(topology, {service for service, _ in ordered}),
            access=access,
        )
        running = asyncio.ensure_future(supervisor.run())
        await asyncio.sleep(0)  # lets the supervisor begin to listen first
        ends.apply_to(supervisor)
        following = asyncio.create_task(link.follow(supervisor))
        ended = await running
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if link.given_up:
            return None
        failed = ended.cause if ended.outcome == RunOutcome.FAILED else ""
        await link.end(supervisor, failed)
        structlog.get_logger("host").info("host ended", cause=ended.cause)
        if failed:
            print(f"host {host}: {failed}", file=sys.stderr)
        return ended.cause == RUN_ENDS
    finally:
        await link.close()
