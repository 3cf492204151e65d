"""Carries out what operators and the scheduler ask of a run: restarts, drains, more or fewer instances, kills, the end.

Requests that concern processes on other hosts are passed on to the supervisors of those hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from launch.placement.desk import KILL_S, HostDesk
from launch.processes.plan import EVERYTHING, LEASING, SUPERVISOR, Key, rolling_order
from launch.supervisor import events as e
from launch.supervisor.runner import Runner
from launch.supervisor.scaling import Scaling
from launch.supervisor.sockets import SupervisorSockets
from launch.supervisor.state import RunLifecycle
from proto.messages import Ack, DrainService, ErrorCode, KillInstance, RestartService, ScaleService, StopRun
from proto.registry import Request
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Answer, Call
from shared.rundir import RunDir, service_name
from shared.topology import load

STATUS_CALL_S = 5.0
FOREIGN_S = 10.0
"""Seconds of silence after which a registered process that the supervisor did not start counts as gone."""


class OperatorRequests:
    """Answers the requests of operators and of the scheduler."""

    def __init__(
        self,
        run: RunDir,
        state: RunLifecycle,
        sockets: SupervisorSockets,
        runner: Runner,
        hosts: HostDesk,
        scaling: Scaling | None,
        *,
        feed: Callable[[e.Event], None],
    ) -> None:
        """`feed` passes an event to the state machine. Without `scaling`, no service can be scaled."""
        self._run = run
        self._state = state
        self._sockets = sockets
        self._runner = runner
        self._hosts = hosts
        self._feed = feed
        self._scaling = scaling
        self._ranks = scaling.ranks if scaling is not None else {}
        self._log = structlog.get_logger(SUPERVISOR)
        handle = sockets.mailbox.handle
        handle(RestartService, self._on_restart)
        handle(DrainService, self._on_drain)
        handle(ScaleService, self._on_scale)
        handle(KillInstance, self._on_kill)
        handle(StopRun, self._on_stop)

    def _on_restart(self, request: RestartService, call: Call) -> Answer | Awaitable[Answer]:
        self._refuse_at_end()
        if request.service == EVERYTHING:
            self._feed(e.RollingRestartAsked(rolling_order(self._state.processes, self._ranks)))
            return self._pass_on(request, [*self._hosts.book.keys()])
        here, away = self._keys(request.service, request.instance)
        self._feed(e.RestartAsked(here))
        return self._pass_on(request, away)

    def _on_drain(self, request: DrainService, call: Call) -> Answer | Awaitable[Answer]:
        self._refuse_at_end()
        here, away = self._keys(request.service, request.instance)
        if request.service not in LEASING:
            text = f"{request.service} cannot be drained: it leases no tasks (only {', '.join(LEASING)} do); restart it"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        ranks = self._ranks.get(request.service, 1)
        if len(here + away) % ranks:
            name = service_name(request.service, request.instance)
            text = f"{name} holds one of {ranks} pieces of its model; drain {request.service} as a whole, or scale it"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        self._feed(e.DrainAsked(here))
        return self._pass_on(request, away)

    async def _on_scale(self, request: ScaleService, call: Call) -> Ack:
        self._refuse_at_end()
        if self._scaling is None:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{request.service} cannot be scaled in this run")
        await self._refuse_foreign(request)
        resized = await asyncio.to_thread(self._scaling.resize, request.service, request.instances)
        self._refuse_at_end()
        book = self._hosts.book
        if book.hosts:
            book.plan(load(self._run.topology))
        here = [key for key in resized if book.host_of(key) is None]
        for key in here:
            self._runner.give(key, resized[key])
        self._log.info("scaled", name=request.service, instances=request.instances)
        self._feed(e.StartAsked(here))
        above = [key for key in self._state.processes if key[0] == request.service and key not in here]
        self._feed(e.DrainAsked(above))
        drained = {(row.service, row.instance) for row in book.rows() if row.state == ProcessState.DRAINED}
        for service, instance in sorted(drained & {*resized}):
            await self._forward(RestartService(service=service, instance=instance), [(service, instance)])
        return Ack()

    async def _refuse_foreign(self, request: ScaleService) -> None:
        """Raise RpcError(bad_request) if one of the instances was started by hand, perhaps on a joined host."""
        status = await self._sockets.status(STATUS_CALL_S)
        ours = {*self._state.processes, *self._hosts.book.keys()}
        for row in status.services if status is not None else ():
            if row.service != request.service or row.heartbeat_age_s >= FOREIGN_S:
                continue
            if (row.service, row.instance) not in ours and row.instance < request.instances:
                name = service_name(row.service, row.instance)
                why = f"{name} was started by hand on host {row.host}; stop it, or use {row.instance} or fewer"
                raise RpcError(ErrorCode.BAD_REQUEST, f"scale {row.service} to {request.instances} refused: {why}")

    def _on_kill(self, request: KillInstance, call: Call) -> Answer | Awaitable[Answer]:
        key = (request.service, request.instance)
        host = self._hosts.book.host_of(key)
        if host is not None:
            return self._hosts.forward(host, request, KILL_S)
        match self._runner.confirm_death(key, request.pid, call):
            case None:
                text = f"{service_name(*key)}: process {request.pid} was not started by this launcher and may be alive"
                raise RpcError(ErrorCode.MISSING, f"{text}; stop it where it runs")
            case True:
                return Ack()
            case False:
                self._log.warning("to be killed", name=service_name(*key), cause=request.cause)
                self._feed(e.KillOrdered(key, request.pid, request.cause))
                return DEFERRED

    def _on_stop(self, _: StopRun, call: Call) -> Ack:
        # deferred, so that the answer is sent before the mailbox closes
        asyncio.get_running_loop().call_soon(self._feed, e.EndAsked("stopped by the operator"))
        return Ack()

    def _keys(self, service: str, instance: int) -> tuple[list[Key], list[Key]]:
        """Return the processes of a service that run on this host, and those on the other hosts.

        `instance` selects one of them; -1 stands for all.
        Raises RpcError(bad_request) if there is no such process.
        """
        here = [key for key in self._state.processes if key[0] == service and instance in (-1, key[1])]
        away = [key for key in [*self._hosts.book.keys()] if key[0] == service and instance in (-1, key[1])]
        if not here and not away:
            raise RpcError(ErrorCode.BAD_REQUEST, f"no service {service_name(service, instance)}")
        return here, away

    def _pass_on(self, request: Request, keys: Sequence[Key]) -> Answer | Awaitable[Answer]:
        """Have the agents on the hosts that run `keys` carry out a request."""
        return self._forward(request, keys) if keys else Ack()

    async def _forward(self, request: Request, keys: Sequence[Key]) -> Ack:
        await asyncio.gather(*(self._hosts.forward(host, request) for host in self._hosts.hosts_of(keys)))
        return Ack()

    def _refuse_at_end(self) -> None:
        if self._state.ending:
            raise RpcError(ErrorCode.DRAINING, "the run is ending, so nothing is started, restarted or drained")
