"""Carries out what operators and the scheduler ask of a run: restarts, drains, more or fewer instances, kills, the end.

Requests that concern processes on other hosts are passed on to the supervisors of those hosts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import structlog

from launch.placement.desk import KILL_S, HostDesk
from launch.processes.plan import (
    EVERYTHING,
    LEASING,
    SUPERVISOR,
    Key,
    Resources,
    gpus_described,
    gpus_wanted,
    listen_endpoint,
    own_gpus,
    resources_of,
    rolling_order,
    threads_of,
)
from launch.supervisor import events as e
from launch.supervisor.runner import Runner
from launch.supervisor.sockets import SupervisorSockets
from launch.supervisor.state import RunLifecycle
from proto.messages import Ack, DrainService, ErrorCode, KillInstance, RestartService, ScaleService, StopRun
from proto.registry import Request
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Answer, Call
from shared.rundir import RunDir, service_name
from shared.topology import Topology, TopologyError, load

STATUS_CALL_S = 5.0
FOREIGN_S = 10.0
"""Seconds of silence after which a registered process that the supervisor did not start counts as gone."""
THREADS_PER_CPU = 4
"""Maximum number of CPU threads of all instances together per CPU that this process may use."""


class OperatorRequests:
    """Answers the requests of operators and of the scheduler."""

    def __init__(
        self,
        run: RunDir,
        state: RunLifecycle,
        sockets: SupervisorSockets,
        runner: Runner,
        hosts: HostDesk,
        ranks: Mapping[str, int] | None,
        *,
        feed: Callable[[e.Event], None],
    ) -> None:
        """`ranks` is the number of processes that together hold one model, by service; without it, no service can be
        scaled. `feed` passes an event to the state machine."""
        self._run = run
        self._state = state
        self._sockets = sockets
        self._runner = runner
        self._hosts = hosts
        self._feed = feed
        self._scales = ranks is not None
        self._ranks = ranks or {}
        self._log = structlog.get_logger(SUPERVISOR)
        handle = sockets.mailbox.handle
        handle(RestartService, self._on_restart)
        handle(DrainService, self._on_drain)
        handle(ScaleService, self._on_scale)
        handle(KillInstance, self._on_kill)
        handle(StopRun, self._on_stop)

    def _on_restart(self, request: RestartService, call: Call) -> Awaitable[Ack]:
        self._refuse_at_end()
        if request.service == EVERYTHING:
            self._feed(e.RollingRestartAsked(rolling_order(self._state.processes, self._ranks)))
            return self._forward(request, [*self._hosts.book.keys()])
        here, away = self._keys(request.service, request.instance)
        self._feed(e.RestartAsked(here))
        return self._forward(request, away)

    def _on_drain(self, request: DrainService, call: Call) -> Awaitable[Ack]:
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
        return self._forward(request, away)

    async def _on_scale(self, request: ScaleService, call: Call) -> Ack:
        self._refuse_at_end()
        if not self._scales:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{request.service} cannot be scaled in this run")
        await self._refuse_foreign(request)
        resized = await asyncio.to_thread(resize, self._run.topology, request.service, request.instances)
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

    async def _forward(self, request: Request, keys: Sequence[Key]) -> Ack:
        """Have the agents on the hosts that run `keys` carry out a request."""
        await asyncio.gather(*(self._hosts.forward(host, request) for host in self._hosts.hosts_of(keys)))
        return Ack()

    def _refuse_at_end(self) -> None:
        if self._state.ending:
            raise RpcError(ErrorCode.DRAINING, "the run is ending, so nothing is started, restarted or drained")


def resize(file: Path, service: str, instances: int) -> dict[Key, Resources]:
    """Return what each of the `instances` of a service is given, and write the number into the run's topology `file`.

    The topology has no key for the number of frozen models on CPUs, so --resume does not start the additional ones.
    Raises a one-line RpcError(bad_request) and writes nothing if the run cannot have this number.
    """
    now = load(file)
    _check(now, service, instances)
    threads, cpus = threads_of(now, service), len(os.sched_getaffinity(0))
    setting = _setting(now, service, instances)
    away = any(spec.service == service for spec in now.away_plan())
    if away and not setting:
        raise _refused(service, instances, "on the CPUs of other hosts, the number follows from the topology")
    if not away and instances * threads > THREADS_PER_CPU * cpus:
        most = THREADS_PER_CPU * cpus // threads
        text = f"{instances * threads} CPU threads on {cpus} CPUs exceed {THREADS_PER_CPU} per CPU"
        raise _refused(service, instances, f"{text}; use {most} or fewer")
    try:
        then = load(file, [setting] if setting else [])
    except TopologyError as error:
        raise _refused(service, instances, "; ".join(str(error).splitlines())) from None
    names = own_gpus()
    if gpus_wanted(then) > len(names):
        text = f"{gpus_wanted(then)} GPUs wanted ({gpus_described(then)}), but there are {len(names)}"
        raise _refused(service, instances, text)
    before, after = resources_of(now, names), resources_of(then, names)
    here = {(spec.service, spec.instance) for spec in now.services_plan() if spec.host == now.home}
    moved = [key for key in before if key in after and after[key].gpus != before[key].gpus and key in here]
    if moved:
        text = f"the GPUs of {service_name(*moved[0])} would change"
        raise _refused(service, instances, f"{text}; stop the run and --resume it with --set {setting}")
    if setting:
        then.dump_resolved(file)
    new = Resources(threads, "", listen_endpoint(then.transport, service))
    return {(service, instance): after.get((service, instance), new) for instance in range(instances)}


def _check(topology: Topology, service: str, instances: int) -> None:
    """Raise RpcError(bad_request) if the service cannot be scaled in this run, or cannot have this number of
    instances."""
    scalable = [name for name in LEASING if name in topology.services.placed]
    if service not in scalable:
        text = f"{service} cannot be scaled: in this run only {', '.join(scalable)} can"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if topology.run.deterministic:
        raise _refused(service, instances, "run.deterministic fixes the plan; start a new run with that number")
    if service in topology.colocated_services:
        raise _refused(service, instances, "it takes turns on devices (placement.colocate), in a fixed plan")
    size = topology.ranks.get(service, 1)
    if instances < 1 or instances % size:
        raise _refused(
            service, instances, f"use a multiple of {size}, at least {size}" if size > 1 else "use 1 or more"
        )


def _setting(topology: Topology, service: str, instances: int) -> str:
    """Return the override that sets the number, or an empty string if the topology has no key for it."""
    if service == "rollout":
        return f"services.rollout.instances={instances}"
    return f"services.{service}.gpus={instances}" if topology.services.placed[service].gpus else ""


def _refused(service: str, instances: int, why: str) -> RpcError:
    return RpcError(ErrorCode.BAD_REQUEST, f"scale {service} to {instances} refused: {why}")
