"""Assigns turns on devices that colocated services share: grants and recalls memory, and has hung processes killed.

The module is pure. Memory is granted only after the processes in the way have reported that they released it, or are
known to be dead. Processes report what they hold, use and want (`HoldDevices`). Only the newest report of each process
counts, and the scheduler answers it when the process must change something. None of this is journaled: what a device
holds is a fact about processes, not a decision, and processes report it again to a restarted scheduler. Until a process
has reported, it counts as holding everything that it could hold (the journal knows which processes were registered), so
a restart never grants memory twice.

There is no deadlock. Services queue in the order in which they first requested something. A waiting process uses
nothing and releases whatever a process earlier in the queue is waiting for; a working process is left alone while it
makes progress and is killed otherwise. The first service in the queue therefore always gets its turn. The processes of
one service work together (ranks meet in collectives) and share one place in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proto.messages import DeviceOrder, ErrorCode, Heartbeat, HoldDevices, Register
from services.scheduler.events import Answer, Effect, Fail, KillProcess, Ref, TellDevices
from shared.actor.service import ProcessState
from shared.colocation.devices import (
    ALL_AT_ONCE,
    NOTHING,
    PARTS_OF,
    DeviceLedger,
    ForbiddenPair,
    Holder,
    Parts,
    barred_by,
    phase_of,
)
from shared.rpc.errors import RpcError
from shared.rundir import service_name


@dataclass
class _Member:
    """One life of a process on the devices."""

    incarnation: int
    pid: int
    progressed_at: float
    known: bool
    """False if the process is older than this scheduler and has not reported what it holds."""
    number: int = 0
    using: Parts = NOTHING
    wants: Parts = NOTHING
    call: Ref | None = None
    answer_by: float = 0.0
    progress: int = 0
    watched_since: float | None = None
    """Time at which the process began to work or to block another one, or None."""
    kill_requested: bool = False


class DeviceTurns:
    """Assigns turns on one set of devices."""

    def __init__(self, limits_s: Mapping[Holder, float]) -> None:
        """`limits_s` maps each process on the devices to the seconds it may work or block others without progress."""
        self._limits_s = dict(limits_s)
        self._members: dict[Holder, _Member] = {}
        self._ledger = DeviceLedger()
        self._places: dict[str, int] = {}
        """Place in the queue of each service that wants something or is working."""
        self._next_place = 1
        self._out: list[Effect] = []
        self._told: dict[Holder, Parts] = {}

    # ---- events

    def begin(self, registry: Mapping[Holder, Register], now: float) -> None:
        """Handle the start of the scheduler: registered processes may hold anything until they report otherwise."""
        for holder, row in registry.items():
            if holder in self._limits_s:
                self._members[holder] = _Member(row.incarnation, row.pid, now, known=False)

    def registered(self, request: Register, now: float) -> None:
        """Register a new life of a process, which holds nothing yet.

        The previous life is dead, so the parts it held are free.
        """
        holder = (request.service, request.instance)
        if holder not in self._limits_s:
            return
        member = self._members.get(holder)
        if member is None or member.incarnation != request.incarnation:
            self._leave(holder)
            self._members[holder] = _Member(request.incarnation, request.pid, now, known=True)

    def gone(self, holder: Holder, incarnation: int) -> None:
        """Remove one life of a process, because the supervisor has reported that it has ended."""
        member = self._members.get(holder)
        if member is not None and member.incarnation == incarnation:
            self._leave(holder)

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Handle a heartbeat. It counts as progress if the worker thread has advanced or the process is still
        starting."""
        member = self._members.get((beat.service, beat.instance))
        if member is None or member.incarnation != beat.incarnation:
            return
        if beat.progress > member.progress or beat.state == ProcessState.STARTING:
            member.progressed_at = now
        member.progress = max(member.progress, beat.progress)

    def hold(self, request: HoldDevices, call: Ref, answer_by: float, now: float) -> None:
        """Record what a process holds, uses and wants. `settle` answers the call.

        Raises RpcError: lost for a life that is not registered, bad_request for parts that the process does not have,
        conflict if the process holds forbidden parts or the report is older than a previous one.
        """
        holder = (request.service, request.instance)
        name = service_name(*holder)
        if holder not in self._limits_s:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{name} does not share any devices (placement.colocate)")
        member = self._members.get(holder)
        if member is None or member.incarnation != request.incarnation:
            raise RpcError(ErrorCode.LOST, f"{name}: this life is not registered; register first")
        if request.number < member.number:
            raise RpcError(ErrorCode.CONFLICT, f"{name}: report {request.number} came after {member.number}")
        holds, using, wants = frozenset(request.holds), frozenset(request.using), frozenset(request.wants)
        invalid = sorted((holds | wants) - PARTS_OF[request.service]) + sorted(using - holds)
        if invalid or (using and wants):
            what = invalid[0] if invalid else f"{min(using)} in use while waiting for {min(wants)}"
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{name}: {what}: its parts are {', '.join(sorted(PARTS_OF[holder[0]]))}"
            )
        try:
            self._ledger.put(holder, holds)
        except ForbiddenPair as error:
            raise RpcError(ErrorCode.CONFLICT, str(error)) from None
        self._tell(holder)
        if member.call is not None and request.number > member.number:
            self._out.append(Fail(member.call, ErrorCode.NOT_READY, f"report {request.number} came in the meantime"))
        if not member.known or request.number > member.number:
            member.progressed_at = now
        member.known, member.number, member.using, member.wants = True, request.number, using, wants
        member.call, member.answer_by = call, answer_by
        self._queue(request.service)

    # ---- decisions

    def settle(self, now: float) -> list[Effect]:
        """Return the effects of all events so far: grants, recalls and kills."""
        if self._members:
            self._decide(now)
        out, self._out = self._out, []
        return out

    def _decide(self, now: float) -> None:
        recalled: dict[Holder, Parts] = {}
        blocking: set[Holder] = set()
        granted: set[Holder] = set()
        ahead = NOTHING
        """Parts that processes earlier in the queue are waiting for."""
        for holder in self._waiting():
            member = self._members[holder]
            wants = member.wants
            free = True
            for other, parts in self._in_the_way(holder, wants).items():
                free = False
                leaves = parts - self._keeps(other, before=holder)
                if leaves or not self._members[other].wants:
                    blocking.add(other)
                recalled[other] = recalled.get(other, NOTHING) | leaves
            must_sleep = holder[0] in ALL_AT_ONCE and bool(recalled.get(holder))
            if free and not must_sleep and (self._peer_works(holder) or barred_by(ahead).isdisjoint(wants)):
                self._ledger.put(holder, self._ledger.of(holder) | wants)
                self._tell(holder)
                member.using, member.wants, member.progressed_at = wants, NOTHING, now
                granted.add(holder)
            else:
                ahead |= wants
        for holder, member in self._members.items():
            self._answer(holder, member, recalled.get(holder, NOTHING), granted, now)
            self._watch(holder, member, bool(member.using) or holder in blocking, now)

    def _waiting(self) -> list[Holder]:
        """Return the waiting processes in the order of the queue."""
        waiting = [holder for holder, member in self._members.items() if member.wants]
        return sorted(waiting, key=lambda holder: (self._places[holder[0]], holder))

    def _in_the_way(self, holder: Holder, wants: Parts) -> dict[Holder, Parts]:
        blocking = self._ledger.in_the_way(holder, wants)
        for other, member in self._members.items():
            if not member.known and other[0] != holder[0]:
                blocking[other] = PARTS_OF[other[0]] & barred_by(wants)
        return {other: parts for other, parts in blocking.items() if parts}

    def _keeps(self, holder: Holder, *, before: Holder) -> Parts:
        """Return the parts that `holder` need not release for `before`.

        A process keeps the parts that it uses and, if it is ahead of `before` in the queue, the parts that it wants.
        """
        member = self._members[holder]
        if member.wants and self._places[holder[0]] < self._places[before[0]]:
            return member.wants
        if member.using and holder[0] in ALL_AT_ONCE:
            return self._ledger.of(holder)
        return member.using if member.known else PARTS_OF[holder[0]]

    def _peer_works(self, holder: Holder) -> bool:
        """Return whether another process of the service uses the parts that `holder` wants.

        That process may be waiting for `holder` in a collective.
        """
        wants = self._members[holder].wants
        return any(
            other[0] == holder[0] and other != holder and wants <= member.using
            for other, member in self._members.items()
        )

    def _answer(self, holder: Holder, member: _Member, recalled: Parts, granted: set[Holder], now: float) -> None:
        if member.call is None:
            return
        parts = self._ledger.of(holder)
        if holder in granted or recalled & parts:
            order = DeviceOrder(parts=sorted(parts - (recalled - member.using)), granted=holder in granted)
            self._out.append(Answer(member.call, order))
        elif member.answer_by <= now:
            self._out.append(Fail(member.call, ErrorCode.NOT_READY, "scheduler: nothing to change on the devices"))
        else:
            return
        member.call = None

    def _watch(self, holder: Holder, member: _Member, watched: bool, now: float) -> None:
        """Kill a process that is working, or that blocks others (`watched`), and makes no progress within its limit."""
        if not watched:
            member.watched_since = None
            return
        if member.watched_since is None:
            member.watched_since = now
        limit_s = self._limits_s[holder]
        if member.kill_requested or now - max(member.watched_since, member.progressed_at) < limit_s:
            return
        member.kill_requested = True
        parts = ", ".join(sorted(self._ledger.of(holder))) or "unknown parts"
        cause = f"held {parts} on shared devices for {limit_s:g} s without progress"
        self._out.append(KillProcess(holder, member.incarnation, member.pid, cause))

    # ---- bookkeeping

    def _queue(self, service: str) -> None:
        busy = any(holder[0] == service and (member.wants or member.using) for holder, member in self._members.items())
        if not busy:
            self._places.pop(service, None)
        elif service not in self._places:
            self._places[service] = self._next_place
            self._next_place += 1

    def _leave(self, holder: Holder) -> None:
        self._members.pop(holder, None)
        self._ledger.put(holder, NOTHING)
        self._tell(holder)
        self._queue(holder[0])

    def _tell(self, holder: Holder) -> None:
        parts = self._ledger.of(holder)
        if self._told.get(holder, NOTHING) != parts:
            self._told[holder] = parts
            self._out.append(TellDevices(service_name(*holder), sorted(parts), phase_of(self._ledger.resident)))
