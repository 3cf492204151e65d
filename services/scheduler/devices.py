"""Whose turn it is on devices that colocated services share: who may load what, who has to give what up, who hangs.
Pure; must never promise room before those in the way have said that they left, or are known to be dead.

Processes say what they hold, what they work with and what they wait for (`HoldDevices`); the newest word of each counts
and is answered once it has to change something. Nothing of this is journaled: what lies on a device is a fact about
processes, not a decision, and they say it again to a scheduler that restarted. Until one has, it counts as holding all
that it could (the journal knows who was registered), so that a restart never grants twice.

No deadlock: services queue in the order in which they began to want something. Who waits uses nothing and gives up what
an earlier one waits for; who works is left alone as long as it gets further, and killed when it does not. So the first
in the queue always gets its turn. Processes of one service work together (ranks meet in collectives): one place in the
queue for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proto.messages import DeviceOrder, ErrorCode, Heartbeat, HoldDevices, Register
from services.scheduler.events import Answer, Effect, Fail, KillProcess, Ref, TellDevices
from shared.devices import ALL_AT_ONCE, NOTHING, PARTS_OF, ForbiddenPair, Holder, Ledger, Parts, barred_by, phase_of
from shared.rpc.errors import RpcError
from shared.rundir import service_name


@dataclass
class _Member:
    """One life of a process on the devices."""

    incarnation: int
    pid: int
    moved_at: float
    known: bool
    """False: it lived before this scheduler did, and has not said what it holds."""
    number: int = 0
    using: Parts = NOTHING
    wants: Parts = NOTHING
    call: Ref | None = None
    answer_by: float = 0.0
    progress: int = 0
    owes_since: float | None = None
    """When it last began to work, or to stand in somebody's way."""
    told_to_die: bool = False


class DeviceTurns:
    """The turns on one set of devices."""

    def __init__(self, limits_s: Mapping[Holder, float]) -> None:
        """`limits_s`: for each process that shares the devices, how long it may stand still at work or in the way."""
        self._limits_s = dict(limits_s)
        self._members: dict[Holder, _Member] = {}
        self._ledger = Ledger()
        self._places: dict[str, int] = {}
        """Place in the queue of a service that wants something, or works."""
        self._next_place = 1
        self._out: list[Effect] = []
        self._told: dict[Holder, Parts] = {}

    # ---- what happens

    def begin(self, registry: Mapping[Holder, Register], now: float) -> None:
        """This life of the scheduler begins: whoever the journal knows may hold anything until it says otherwise."""
        for holder, known in registry.items():
            if holder in self._limits_s:
                self._members[holder] = _Member(known.incarnation, known.pid, now, known=False)

    def registered(self, request: Register, now: float) -> None:
        """A new life of a process holds nothing, and the one before it is dead: so its parts are off."""
        holder = (request.service, request.instance)
        if holder not in self._limits_s:
            return
        member = self._members.get(holder)
        if member is None or member.incarnation != request.incarnation:
            self._leave(holder)
            self._members[holder] = _Member(request.incarnation, request.pid, now, known=True)

    def gone(self, holder: Holder, incarnation: int) -> None:
        """The supervisor says that this life of the process is over."""
        member = self._members.get(holder)
        if member is not None and member.incarnation == incarnation:
            self._leave(holder)

    def beat(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat: it is progress if the working thread got further, or the process is still starting."""
        member = self._members.get((beat.service, beat.instance))
        if member is None or member.incarnation != beat.incarnation:
            return
        if beat.progress > member.progress or beat.state == "STARTING":
            member.moved_at = now
        member.progress = max(member.progress, beat.progress)

    def hold(self, request: HoldDevices, call: Ref, answer_by: float, now: float) -> None:
        """A process says what it holds, uses and wants; `settle` answers.

        Raises RpcError: lost for a life that is not registered, bad_request for parts that are not this process's,
        conflict when it holds what it may not, or the report is older than one that came before it.
        """
        holder = (request.service, request.instance)
        name = service_name(*holder)
        if holder not in self._limits_s:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{name} shares no devices (placement.colocate)")
        member = self._members.get(holder)
        if member is None or member.incarnation != request.incarnation:
            raise RpcError(ErrorCode.LOST, f"{name}: this life of it is not registered; register first")
        if request.number < member.number:
            raise RpcError(ErrorCode.CONFLICT, f"{name}: report {request.number} came after {member.number}")
        holds, using, wants = frozenset(request.holds), frozenset(request.using), frozenset(request.wants)
        strange = sorted((holds | wants) - PARTS_OF[request.service]) + sorted(using - holds)
        if strange or (using and wants):
            what = strange[0] if strange else f"{min(using)} in use while waiting for {min(wants)}"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{name}: {what}: it has {', '.join(sorted(PARTS_OF[holder[0]]))}")
        try:
            self._ledger.put(holder, holds)
        except ForbiddenPair as error:
            raise RpcError(ErrorCode.CONFLICT, str(error)) from None
        self._tell(holder)
        if member.call is not None and request.number > member.number:
            self._out.append(Fail(member.call, ErrorCode.NOT_READY, f"report {request.number} came meanwhile"))
        if not member.known or request.number > member.number:
            member.moved_at = now
        member.known, member.number, member.using, member.wants = True, request.number, using, wants
        member.call, member.answer_by = call, answer_by
        self._queue(request.service)

    # ---- what follows

    def settle(self, now: float) -> list[Effect]:
        """After anything happened: grant, order, kill."""
        if self._members:
            self._decide(now)
        out, self._out = self._out, []
        return out

    def _decide(self, now: float) -> None:
        recalled: dict[Holder, Parts] = {}
        blocking: set[Holder] = set()
        granted: set[Holder] = set()
        ahead = NOTHING
        """What those earlier in the queue wait for."""
        for holder in self._waiting():
            member = self._members[holder]
            wants = member.wants
            free = True
            for other, parts in self._in_the_way(holder, wants).items():
                free = False
                leaves = parts - self._keeps(other, before=holder)
                if leaves or not self._waits(other):
                    blocking.add(other)
                recalled[other] = recalled.get(other, NOTHING) | leaves
            must_sleep = holder[0] in ALL_AT_ONCE and bool(recalled.get(holder))
            if free and not must_sleep and (self._works_already(holder) or barred_by(ahead).isdisjoint(wants)):
                self._ledger.put(holder, self._ledger.of(holder) | wants)
                self._tell(holder)
                member.using, member.wants, member.moved_at = wants, NOTHING, now
                granted.add(holder)
            else:
                ahead |= wants
        for holder, member in self._members.items():
            self._answer(holder, member, recalled.get(holder, NOTHING), granted, now)
            self._watch(holder, member, bool(member.using) or holder in blocking, now)

    def _waiting(self) -> list[Holder]:
        """In the order of the queue."""
        waiting = [holder for holder, member in self._members.items() if member.wants]
        return sorted(waiting, key=lambda holder: (self._places[holder[0]], holder))

    def _in_the_way(self, holder: Holder, wants: Parts) -> dict[Holder, Parts]:
        found = self._ledger.in_the_way(holder, wants)
        for other, member in self._members.items():
            if not member.known and other[0] != holder[0]:
                found[other] = PARTS_OF[other[0]] & barred_by(wants)
        return {other: parts for other, parts in found.items() if parts}

    def _waits(self, holder: Holder) -> bool:
        return bool(self._members[holder].wants)

    def _keeps(self, holder: Holder, *, before: Holder) -> Parts:
        """What `holder` need not give up to `before`: what it works with, or waits for at an earlier place."""
        member = self._members[holder]
        if member.wants and self._places[holder[0]] < self._places[before[0]]:
            return member.wants
        if member.using and holder[0] in ALL_AT_ONCE:
            return self._ledger.of(holder)
        return member.using if member.known else PARTS_OF[holder[0]]

    def _works_already(self, holder: Holder) -> bool:
        """Another process of the service works with as much: they may be waiting for this one in a collective."""
        wants = self._members[holder].wants
        return any(
            other[0] == holder[0] and other != holder and wants <= member.using
            for other, member in self._members.items()
        )

    def _answer(self, holder: Holder, member: _Member, recalled: Parts, granted: set[Holder], now: float) -> None:
        if member.call is None:
            return
        held = self._ledger.of(holder)
        if holder in granted or recalled & held:
            order = DeviceOrder(parts=sorted(held - (recalled - member.using)), granted=holder in granted)
            self._out.append(Answer(member.call, order))
        elif member.answer_by <= now:
            self._out.append(Fail(member.call, ErrorCode.NOT_READY, "scheduler: nothing to change on the devices"))
        else:
            return
        member.call = None

    def _watch(self, holder: Holder, member: _Member, owes: bool, now: float) -> None:
        """Who works gets further, who stands in the way leaves in time, or is killed."""
        if not owes:
            member.owes_since = None
            return
        if member.owes_since is None:
            member.owes_since = now
        limit_s = self._limits_s[holder]
        if member.told_to_die or now - max(member.owes_since, member.moved_at) < limit_s:
            return
        member.told_to_die = True
        parts = ", ".join(sorted(self._ledger.of(holder))) or "what it does not tell"
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
