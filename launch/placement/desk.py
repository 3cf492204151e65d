"""Carries out what `HostBook` decides: answers agents, informs the scheduler, and passes requests on.

An agent reports once a second and is answered with everything its host should run, so nothing needs to be repaired
after a lost report or the restart of an agent. Requests of an operator or of the scheduler that concern a process on
another host go to the supervisor of that host's agent, which answers them just as this supervisor would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, assert_never

import structlog

from launch.placement.book import HostBook, HostEffect, HostEntry, HostLost, HostState, Told, Unable
from launch.processes.plan import SUPERVISOR, Key
from proto.messages import Ack, ErrorCode, HostCheck, HostFacts, HostGone, HostOrders, HostReport
from proto.registry import Request
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rundir import service_name

LOOK_S = 1.0
GONE_CALL_S = 2.0
FORWARD_S = 2.5
"""Maximum time, in seconds, for an agent to answer a forwarded request. Callers wait longer than that."""
KILL_S = 4.5
MOST_REFUSED = 64
"""Maximum number of refused hosts whose reasons are shown. Refusals of further hosts are only logged."""
END_S = 40.0
"""Maximum seconds to wait for agents to stop their processes at the end of a run."""


Refusals = Callable[[str, HostFacts], Sequence[str]]
"""Returns the reasons why a host with these facts cannot take part in the run."""


class HostDesk:
    """Serves the agents of a run's other hosts, on the event loop of the run's supervisor."""

    def __init__(
        self,
        book: HostBook,
        refusals: Refusals | None,
        mailbox: Mailbox,
        scheduler: Callable[[], Client],
        client_of: Callable[[str, str], Client],
        *,
        on_notice: Callable[[str], None],
        on_unable: Callable[[str], None],
    ) -> None:
        """The agents ask at `mailbox`. `scheduler` returns the scheduler's client, and `client_of` the client of a
        process by its name and endpoint. `on_notice` is called with each line for the user, and `on_unable` with the
        cause if the processes of a host cannot continue.
        """
        self.book, self._refusals = book, refusals
        self._scheduler, self._client_of = scheduler, client_of
        self._refused: dict[str, str] = {}
        """The last reasons for which each host was refused."""
        self.on_unable = on_unable
        self.tell = on_notice
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._log = structlog.get_logger("hosts")
        mailbox.handle(HostCheck, self._on_check)
        mailbox.handle(HostReport, self._on_report)

    def begin(self) -> None:
        """Look for silent agents from now on."""
        for host in self.book.hosts.values():
            host.since = asyncio.get_running_loop().time()
        self._background(self._look())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- events

    def lose(self, host: str, cause: str) -> None:
        """Treat a host as lost, because the placement engine reports that it is gone."""
        self._carry_out(self.book.lose(host, cause, asyncio.get_running_loop().time()))

    def end(self) -> None:
        """Have all agents stop their processes."""
        if not self.book.ending:
            self.book.ending = True
            if not self.book.running:
                self._ended.set()

    async def ended(self) -> None:
        """Return when the agents have stopped their processes, or after `END_S` seconds."""
        try:
            await asyncio.wait_for(self._ended.wait(), END_S)
        except TimeoutError:
            self._log.warning("agents have not ended", limit_s=END_S)

    def _on_check(self, check: HostCheck, call: Call) -> Ack:
        with self._telling_refusals(check.host):
            self.book.host(check.host)
            if self._refusals is not None and (problems := self._refusals(check.host, check.facts)):
                raise RpcError(ErrorCode.BAD_REQUEST, "\n".join(problems))
        return Ack()

    def _on_report(self, report: HostReport, call: Call) -> HostOrders:
        with self._telling_refusals(report.host):
            orders, effects = self.book.report(report, asyncio.get_running_loop().time())
        self._carry_out(effects)
        return orders

    @contextlib.contextmanager
    def _telling_refusals(self, host: str) -> Iterator[None]:
        """Show the user why an agent is refused, unless that was also the last reason."""
        try:
            yield
        except RpcError as error:
            text = str(error)
            room = host in self._refused or len(self._refused) < MOST_REFUSED
            if not room:
                self._log.warning("host refused", host=host[:80], why=text[:300])
            elif error.code == ErrorCode.BAD_REQUEST and self._refused.get(host) != text:
                self._refused[host] = text
                for line in text.splitlines():
                    self.tell(f"host {host} is refused: {line}")
            raise

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._carry_out(self.book.look(asyncio.get_running_loop().time()))

    def _carry_out(self, effects: Iterable[HostEffect]) -> None:
        for effect in effects:
            match effect:
                case HostLost():
                    self._log.warning("host lost", host=effect.host, cause=effect.cause)
                    gone = HostGone(host=effect.host, incarnations=effect.incarnations, cause=effect.cause)
                    self._background(self._tell_scheduler(gone))
                case Told():
                    self.tell(effect.text)
                case Unable():
                    self.on_unable(effect.cause)
                case _:
                    assert_never(effect)
        if self.book.ending and not self.book.running:
            self._ended.set()

    async def _tell_scheduler(self, gone: HostGone) -> None:
        """Repeat the message until the scheduler acknowledges it.

        A restarted scheduler may still know the leases of the host.
        """
        while True:
            try:
                await self._scheduler().call(gone, Ack, deadline_s=GONE_CALL_S)
            except RpcError as error:
                self._log.warning("scheduler not told of a lost host", error=str(error))
                await asyncio.sleep(max(error.retry_after_s, LOOK_S))
            else:
                return

    # ---- requests for other hosts

    def hosts_of(self, keys: Iterable[Key]) -> list[HostEntry]:
        """Return the hosts that run the processes `keys`, except this machine."""
        hosts = {host.name: host for key in keys if (host := self.book.host_of(key)) is not None}
        return list(hosts.values())

    async def forward(self, host: HostEntry, request: Request, deadline_s: float = FORWARD_S) -> Ack:
        """Have the agent of `host` carry out a request. Raises RpcError(not_ready) if the host has no agent now."""
        if host.state != HostState.JOINED or host.report is None or not host.report.endpoint:
            raise RpcError(ErrorCode.NOT_READY, f"host {host.name} is {host.state}: nothing is running there now")
        client = self._client_of(f"{service_name(SUPERVISOR, 0)} of host {host.name}", host.report.endpoint)
        return await client.call(request, Ack, deadline_s=deadline_s)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
