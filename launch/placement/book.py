"""Decides which host runs what. `report`, `lose` and `look` return orders and effects. No socket or clock is used.

A host is AWAITED until its agent reports, then JOINED. It is LOST once the engine that placed it says so, or its agent
falls silent or leaves before the run ends; then its processes move to a joined host with room, and the scheduler is
told. A lost host that reports under a new incarnation is JOINED again, with a new store. It gets back only what no
other host had room for, because moving a working process costs its leases. An agent whose host was lost is told so and
joins again under a new incarnation, because its processes may already be running elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from launch.processes.plan import Key, threads_of, visible_gpus
from proto.messages import ErrorCode, HostOrders, HostProcess, HostReport, HostRow, ProcessRow, WaitKind, WaitRow
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.topology import Topology

SILENT_S = 20.0
"""Seconds of silence after which an agent's host is considered lost."""


class HostState(StrEnum):
    """The states of a host."""

    AWAITED = "AWAITED"
    JOINED = "JOINED"
    LOST = "LOST"
    ENDED = "ENDED"


@dataclass(frozen=True)
class HostLost:
    """Tell the scheduler that the host is gone."""

    host: str
    incarnations: list[int]
    """Incarnations of the processes that ran there."""
    cause: str


@dataclass(frozen=True)
class Told:
    """One human-readable line about the run."""

    text: str


@dataclass(frozen=True)
class Unable:
    """End the run, because the processes of a host cannot continue."""

    cause: str


HostEffect = HostLost | Told | Unable


@dataclass(frozen=True, eq=False)
class UnitPlace:
    """The place of a unit: processes that run on one host together. They are a single instance, the ranks of one model
    that the topology places there, or services that share GPUs."""

    processes: Mapping[Key, Sequence[int]]
    """The GPUs of each process, numbered from the unit's first GPU."""
    host: str
    """The host on which the unit runs or will run: at first, the one that the topology names."""
    first_gpu: int = 0
    number: int = 0
    """Rank among units without a host: units that were planned first are placed first."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the unit needs."""
        return max((gpu + 1 for numbers in self.processes.values() for gpu in numbers), default=0)


@dataclass
class HostEntry:
    """One host as the book knows it: its state, its GPUs and its last report."""

    name: str
    gpus: int
    """Number of the host's GPUs that the topology allows the run to use."""
    store: Key
    state: HostState = HostState.AWAITED
    since: float = 0.0
    """Time at which this state began."""
    report: HostReport | None = None
    """The last report of the agent's current incarnation."""
    heard_at: float = 0.0
    cause: str = ""
    """The last reason why an agent was lost or could not join."""
    given_up: set[int] = field(default_factory=set)
    """Incarnations that count as lost. Their agents must join again under new ones."""


class HostBook:
    """The hosts of a run except the one on which it was started, and the place of every process on them."""

    def __init__(self, topology: Topology | None = None) -> None:
        """Without a topology, the run has no other hosts."""
        self._threads: dict[str, int] = {}
        """The number of CPU threads of each process, by service."""
        self.hosts: dict[str, HostEntry] = {}
        self.home = topology.home if topology is not None else None
        stores = topology.store_hosts() if topology is not None else []
        for number, name in enumerate(stores):
            if topology is not None and name is not None and name != topology.home:
                self.hosts[name] = HostEntry(name, topology.placement.hosts[name].gpus, ("batch-store", number))
        self._places: dict[Key, UnitPlace] = {}
        """The place of every process except the stores."""
        self._on: dict[str, dict[UnitPlace, None]] = {name: {} for name in self.hosts}
        """The places on each host, so that a report of one host can be handled without looking at the other hosts."""
        self._numbers = itertools.count()
        self._next_store = len(stores)
        self.ending = False
        if topology is not None:
            self.plan(topology)

    # ---- questions

    def host(self, name: str) -> HostEntry:
        """Return a host by its name. Raises RpcError(bad_request) if there is no such host."""
        if name not in self.hosts:
            there = ", ".join(self.hosts)
            text = f"host {name!r} is not one of the hosts in this run's placement.hosts, which names {there}; give one"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text} of them with --name")
        return self.hosts[name]

    def keys(self) -> Iterable[Key]:
        """Return every process that belongs on one of these hosts."""
        yield from (host.store for host in self.hosts.values())
        yield from self._places

    def host_of(self, key: Key) -> HostEntry | None:
        """Return the host that runs or will run a process, or None if none of these hosts does."""
        place = self._places.get(key)
        if place is not None:
            return self.hosts[place.host]
        return next((host for host in self.hosts.values() if host.store == key), None)

    def rows(self) -> list[ProcessRow]:
        """Return the processes of all hosts, as reported by their agents, or as WAITING while no agent runs them.

        They include processes that have been drained for good, because the service has fewer instances now.
        """
        rows = {key: ProcessRow(*key, "WAITING", 0, 0, 0) for key in self.keys()}
        for host in self.hosts.values():
            for row in host.report.processes if host.state == HostState.JOINED and host.report is not None else ():
                place = self._places.get((row.service, row.instance))
                if place is None or place.host == host.name:
                    rows[row.service, row.instance] = row
        return list(rows.values())

    def host_rows(self, now: float) -> list[HostRow]:
        """Return a row for each host, with its state, its silence and its processes."""
        return [
            HostRow(
                host=host.name,
                state=host.state,
                state_s=now - host.since,
                silent_s=now - host.heard_at if host.report is not None else -1.0,
                processes=[
                    service_name(*key)
                    for key in (host.store, *(key for place in self._on[host.name] for key in place.processes))
                ],
                cause=host.cause,
            )
            for host in self.hosts.values()
        ]

    @property
    def all_ready(self) -> bool:
        """Whether every process is READY or DRAINED. The store of a spare host without an agent does not count."""
        spare = {
            host.store for host in self.hosts.values() if host.state == HostState.AWAITED and not self._on[host.name]
        }
        rows = (row for row in self.rows() if (row.service, row.instance) not in spare)
        return all(row.state in (ProcessState.READY, ProcessState.DRAINED) for row in rows)

    def waits(self, now: float) -> list[WaitRow]:
        """Return a row for each host that is currently not part of the run."""
        return [
            WaitRow(
                WaitKind.PROCESS,
                f"host {host.name} is {host.state}: no agent is reporting from it"
                + (f" (last: {host.cause})" if host.cause else ""),
                now - host.since,
            )
            for host in self.hosts.values()
            if host.state in (HostState.AWAITED, HostState.LOST)
        ]

    @property
    def running(self) -> bool:
        """Whether there is a live agent that has not yet stopped its processes."""
        return any(host.state == HostState.JOINED for host in self.hosts.values())

    # ---- events

    def plan(self, topology: Topology) -> None:
        """Place the processes of `topology`. Processes that already have a place keep it."""
        self._threads = {spec.service: threads_of(topology, spec.service) for spec in topology.services_plan()}
        placed = {frozenset(place.processes): place for place in self._places.values()}
        units = {frozenset(unit.processes): unit for unit in _units(topology)}
        for keys in placed.keys() - units.keys():
            self._remove(placed[keys])
        for keys, unit in units.items():
            if keys not in placed:
                first = self._first_gpu(self.hosts[unit.host], unit)
                self._put(replace(unit, first_gpu=first or 0, number=next(self._numbers)))

    def report(self, report: HostReport, now: float) -> tuple[HostOrders, list[HostEffect]]:
        """Process an agent's report. Return the agent's orders, and the effects to carry out.

        Raises RpcError if the agent cannot take part.
        """
        host = self.host(report.host)
        if report.gpus < host.gpus:
            text = f"host {host.name}: placement.hosts gives it {host.gpus} GPUs, but its agent may use {report.gpus}"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; lower that, or check its CUDA_VISIBLE_DEVICES")
        if report.incarnation in host.given_up:
            raise RpcError(ErrorCode.LOST, f"host {host.name}: considered lost, because it was silent; join again")
        effects: list[HostEffect] = []
        last = host.report
        if host.state == HostState.JOINED and last is not None and last.incarnation != report.incarnation:
            text = f"host {host.name}: another agent of this host is alive; stop one of them"
            raise RpcError(ErrorCode.CONFLICT, text)
        if host.state != HostState.JOINED and not report.ended:
            if host.state == HostState.LOST:  # its former store is gone for good, with its contents
                host.store = ("batch-store", self._next_store)
                self._next_store += 1
            host.state, host.since = HostState.JOINED, now
            effects.append(Told(f"host {host.name} has joined"))
            self._place_homeless(effects)
        host.report, host.heard_at = report, now
        if report.ended and not self.ending:
            effects += self.lose(host.name, "its agent ended", now)
        elif report.ended:
            host.state, host.since = HostState.ENDED, now
        elif report.failed:
            effects.append(Unable(f"host {host.name}: {report.failed}"))
        return self._orders(host), effects

    def lose(self, name: str, cause: str, now: float) -> list[HostEffect]:
        """Treat a host as lost. Its processes move to other hosts that have room for them."""
        host = self.hosts[name]
        effects: list[HostEffect] = []
        if host.state != HostState.JOINED or host.report is None:
            if host.state != HostState.ENDED and not self.ending and host.cause != cause:
                host.cause = cause
                effects.append(Told(f"host {name} is not part of the run: {cause}"))
            return effects
        host.cause = cause
        host.state, host.since = HostState.LOST, now
        host.given_up.add(host.report.incarnation)
        lives = [row.incarnation for row in host.report.processes if row.incarnation]
        effects.append(HostLost(name, lives, cause))
        effects.append(Told(f"host {name} is lost: {cause}"))
        self._place_homeless(effects)
        return effects

    def look(self, now: float) -> list[HostEffect]:
        """Treat every host whose agent has been silent for too long as lost."""
        silent = [
            host.name
            for host in self.hosts.values()
            if host.state == HostState.JOINED and now - host.heard_at > SILENT_S
        ]
        return [
            effect
            for name in silent
            for effect in self.lose(name, f"its agent has been silent for {SILENT_S:g} s", now)
        ]

    # ---- decisions

    def _orders(self, host: HostEntry) -> HostOrders:
        placed: dict[Key, list[int]] = {host.store: []}
        for place in self._on[host.name]:
            placed.update({key: [place.first_gpu + gpu for gpu in gpus] for key, gpus in place.processes.items()})
        rows = [HostProcess(*key, self._threads.get(key[0], 1), gpus) for key, gpus in placed.items()]
        return HostOrders(processes=rows, ends=self.ending)

    def _place_homeless(self, effects: list[HostEffect]) -> None:
        """Move the units of lost hosts to joined hosts with room, preferring hosts with the fewest processes."""
        if self.ending:
            return
        lost = [host.name for host in self.hosts.values() if host.state == HostState.LOST]
        homeless = sorted((place for name in lost for place in self._on[name]), key=lambda place: place.number)
        joined = [host for host in self.hosts.values() if host.state == HostState.JOINED] if homeless else []
        loads = [(self._load(host), at) for at, host in enumerate(joined)]
        heapq.heapify(loads)
        too_large: float = math.inf  # no host has this many adjacent free GPUs
        for place in homeless:
            if place.gpus >= too_large:
                continue
            full = []
            while loads:
                load, at = heapq.heappop(loads)
                full.append((load, at))
                first = self._first_gpu(joined[at], place)
                if first is not None:
                    full[-1] = (load + len(place.processes), at)
                    self._move(place, joined[at], first, effects)
                    break
            else:
                too_large = place.gpus
            for entry in full:
                heapq.heappush(loads, entry)

    def _move(self, place: UnitPlace, host: HostEntry, first_gpu: int, effects: list[HostEffect]) -> None:
        self._remove(place)
        self._put(replace(place, host=host.name, first_gpu=first_gpu))
        names = ", ".join(service_name(*key) for key in place.processes)
        effects.append(Told(f"{names}: placed on host {host.name} instead of {place.host}"))

    def _put(self, place: UnitPlace) -> None:
        self._places.update(dict.fromkeys(place.processes, place))
        self._on[place.host][place] = None

    def _remove(self, place: UnitPlace) -> None:
        for key in place.processes:
            del self._places[key]
        del self._on[place.host][place]

    def _load(self, host: HostEntry) -> int:
        return sum(len(place.processes) for place in self._on[host.name])

    def _first_gpu(self, host: HostEntry, unit: UnitPlace) -> int | None:
        """Return the first of the adjacent free GPUs that a unit would get on a host, or None if there is no room."""
        taken = {
            gpu
            for place in self._on[host.name]
            if place.processes is not unit.processes
            for gpu in range(place.first_gpu, place.first_gpu + place.gpus)
        }
        starts = range(host.gpus - unit.gpus + 1)
        return next((at for at in starts if taken.isdisjoint(range(at, at + unit.gpus))), None)


def _units(topology: Topology) -> list[UnitPlace]:
    """Return the units that the topology places on other hosts, except the stores."""
    seen = visible_gpus(topology)
    ranks = {**topology.ranks, "rollout": 1}
    groups: dict[tuple[str, str, int], list[Key]] = {}
    for spec in topology.away_plan():
        if spec.service in ranks:
            shared = spec.service in topology.colocated_services
            group = ("", 0) if shared else (spec.service, spec.instance // ranks[spec.service])
            groups.setdefault((str(spec.host), *group), []).append((spec.service, spec.instance))
    units = []
    for (host, *_), keys in groups.items():
        gpus = {key: [int(gpu) for gpu in seen[key].split(",") if gpu] for key in keys}
        base = min((gpu for numbers in gpus.values() for gpu in numbers), default=0)
        units.append(UnitPlace({key: [gpu - base for gpu in numbers] for key, numbers in gpus.items()}, host))
    return units
