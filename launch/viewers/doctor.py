"""`ctl doctor`: asks every process of a run what it is waiting for, and finds the causes in the graph of these waits.

A process that does not answer is itself a finding, because a mailbox answers even while its process computes.
`diagnose` is a pure function.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import psutil
import zmq

from launch.processes.plan import SUPERVISOR, Key
from launch.processes.programs import stopped_processes
from launch.viewers.peer import Run, answer_or_none, no_answer_text
from proto.ids import new_incarnation
from proto.messages import (
    ErrorCode,
    GetStatus,
    GetSupervisorState,
    GetWaits,
    ServiceRow,
    Status,
    SupervisorState,
    TroubleKind,
    TroubleRow,
    WaitKind,
    WaitRow,
    Waits,
)
from shared.actor.service import ProcessState
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name, service_name
from shared.security import keys
from shared.security.access import Access
from shared.security.curve import is_tcp
from shared.security.keys import Keyring
from shared.security.roles import Role

ANSWER_S = 1.5
"""Maximum seconds to wait for each process's answer."""
STALL_S = 5.0
"""Seconds after which a wait by the next step, a lease without progress or a call to users' code is reported as a
cause.
"""
IDLE_S = 8.0
"""Seconds without progress after which a computation counts as a fault. Clears that a store has not acknowledged count
as faults after the same time."""
REFUSED_S = 1.0
SLOW_START_S = 30.0
LEFT_S = 60.0
"""Seconds of silence after which a process that the supervisor did not start counts as gone."""
TOLD_S = 1.0
"""Seconds after which a wait is listed."""
POLLS = frozenset({"LeaseRequest", "NextBatch", "WaitEvals", "HoldDevices", "TakeSamples"})
"""Requests that are normally deferred until there is something to do."""
_STATES = frozenset({WaitKind.PROCESS, WaitKind.STOPPED})
_AWAY = frozenset(
    {ProcessState.WAITING, ProcessState.BACKOFF, ProcessState.STOPPED, ProcessState.FAILED, ProcessState.DRAINED}
)


@dataclass
class Examined:
    """What the doctor has learned about a run."""

    run: str
    answers: dict[str, Waits | None]
    """The answers by process name, or None for a process that should have answered but did not."""
    states: dict[str, str] = field(default_factory=dict)
    """States of processes as the supervisor sees them."""
    troubles: list[TroubleRow] = field(default_factory=list)
    step: int | None = None
    steps: int | None = None
    silent_s: dict[str, float] = field(default_factory=dict)
    """Seconds since the last heartbeat of each process that the scheduler knows."""

    def rows(self) -> Iterator[tuple[str, WaitRow]]:
        """Yield every wait with the name of the process that reported it."""
        for name, answer in self.answers.items():
            for row in answer.waits if answer is not None else ():
                yield name, row


@dataclass(frozen=True)
class Finding:
    """A cause, or a wait that is not a fault in itself. `stalls` are the waits that depend on it, nearest first."""

    wrong: bool
    service: str
    text: str
    since_s: float = 0.0
    limit_s: float = 0.0
    stalls: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------- examine


async def examine(run: Run) -> Examined:
    """Ask all processes. Raises RpcError if neither the scheduler nor the supervisor answers."""
    status, state = await asyncio.gather(
        answer_or_none(run, "scheduler", GetStatus(), Status),
        answer_or_none(run, SUPERVISOR, GetSupervisorState(), SupervisorState),
    )
    if status is None and state is None:
        raise RpcError(ErrorCode.DEADLINE, no_answer_text(run))
    states = {service_name(row.service, row.instance): row.state for row in state.processes} if state else {}
    registered = {service_name(row.service, row.instance): row for row in status.services} if status else {}
    ours = {f"{SUPERVISOR}/0", "scheduler/0", *(name for name, stated in states.items() if stated not in _AWAY)}
    # A process that was started by hand may have left, so it is reported as missing only for a while.
    foreign = {name for name, row in registered.items() if name not in states and row.heartbeat_age_s < LEFT_S}
    ring = _keyring(run)
    endpoints = {
        **{name: _endpoint(run, name, registered.get(name), ring) for name in sorted(ours)},
        **{name: _endpoint_of(registered[name], ring) for name in sorted(foreign - ours)},
    }
    answers = await _answers({name: endpoint for name, endpoint in endpoints.items() if endpoint}, ring)
    if answers.get(f"{SUPERVISOR}/0") is None and isinstance(run, RunDir):
        rows = _stopped(registered.values())
        answers["this host"] = Waits(incarnation=0, state="", state_s=0.0, waits=rows)
    troubles = list(status.troubles) if status is not None else []
    step, steps = (status.step, status.steps) if status is not None else (None, None)
    silent_s = {name: row.heartbeat_age_s for name, row in registered.items()}
    return Examined(run.name, answers, states, troubles, step, steps, silent_s)


async def _answers(endpoints: Mapping[str, str], ring: Keyring | None) -> dict[str, Waits | None]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        answers = await asyncio.gather(*(_ask(context, name, where, ring) for name, where in endpoints.items()))
        return dict(zip(endpoints, answers, strict=True))
    finally:
        await asyncio.get_running_loop().run_in_executor(None, context.term)


def _keyring(run: Run) -> Keyring | None:
    if isinstance(run, Access):
        return run.keys
    try:
        return keys.load(run.keys, Role.OPERATOR)
    except RpcError:
        return None  # A run on one host has no keys.


def _endpoint(run: Run, name: str, row: ServiceRow | None, ring: Keyring | None) -> str:
    """Return the endpoint of a process in the run's plan, or an empty string if it is out of reach."""
    service, instance = parse_service_name(name)
    if isinstance(run, RunDir):
        away = row is not None and is_tcp(row.endpoint) and not run.socket_file(service, instance).exists()
        return _endpoint_of(row, ring) if row is not None and away else run.endpoint(service, instance)
    if service in run.endpoints:
        return run.endpoints[service]
    return _endpoint_of(row, ring) if row is not None else ""


def _endpoint_of(row: ServiceRow, ring: Keyring | None) -> str:
    """Return the endpoint that a process registered, or an empty string if it is out of reach."""
    reachable = ring is not None if is_tcp(row.endpoint) else row.host == socket.gethostname()
    return row.endpoint if reachable else ""


async def _ask(context: zmq.Context[zmq.Socket[bytes]], name: str, endpoint: str, ring: Keyring | None) -> Waits | None:
    client = Client(context, endpoint, name, new_incarnation(), keys=ring if is_tcp(endpoint) else None)
    try:
        return await client.call(GetWaits(), Waits, deadline_s=ANSWER_S)
    except RpcError:
        return None
    finally:
        client.close()


def _stopped(services: Iterable[ServiceRow]) -> list[WaitRow]:
    """Return the stopped processes on this host. They are found without the supervisor, which may be one of them."""
    here = {(row.service, row.instance): row.pid for row in services if row.host == socket.gethostname()}
    pids: dict[Key, int] = dict(here)
    for pid in here.values():
        try:
            pids[(SUPERVISOR, 0)] = psutil.Process(pid).ppid()
            break
        except psutil.Error:
            continue
    return stopped_processes(pids)


# -------------------------------------------------------------------------------------------------- diagnose


def diagnose(examined: Examined) -> list[Finding]:
    """Return the findings: causes first, ordered by the number of their stalls, then waits that are not faults in
    themselves."""
    graph = _Graph(examined)
    wrong = [*_processes(graph), *_stores(graph), *_services(graph), *_leases(graph), *_troubles(graph)]
    wrong += _unexplained(graph, wrong)
    wrong.sort(key=lambda finding: (-len(finding.stalls), -finding.since_s))
    return [*wrong, *_notices(graph, wrong)]


class _Graph:
    """The waits between the processes of a run, as a graph."""

    def __init__(self, examined: Examined) -> None:
        self.examined = examined
        self.rows = list(examined.rows())
        self.stalled = [row for _, row in self.rows if row.kind == WaitKind.STEP and row.since_s >= STALL_S]

    def waiters(self, name: str) -> list[tuple[str, WaitRow]]:
        """Return the waits for a process, except those that have just begun."""
        service = name.partition("/")[0]
        return [
            (who, row)
            for who, row in self.rows
            if row.of in (name, service)
            and who != name
            and (row.kind == WaitKind.OUTAGE or (row.since_s >= TOLD_S and row.kind not in _STATES))
        ]

    def stalls(self, name: str) -> tuple[str, ...]:
        """Return the waits that depend on a process, directly or indirectly, nearest first, each of them once."""
        lines: dict[str, None] = {}
        asked, seen = [name], {name}
        while asked:
            for who, row in self.waiters(asked.pop(0)):
                lines[f"{who}: {told(row)}"] = None
                if who not in seen:
                    seen.add(who)
                    asked.append(who)
        return tuple(lines)

    def is_stalled(self, name: str) -> bool:
        """Return whether the next step is waiting for this process."""
        service = name.partition("/")[0]
        return any(row.of in (name, service) for row in self.stalled)

    def finding(self, name: str, text: str, row: WaitRow | None = None) -> Finding:
        since_s, limit_s = (row.since_s, row.limit_s) if row is not None else (0.0, 0.0)
        return Finding(True, name, text, since_s, limit_s, self.stalls(name))


def _processes(graph: _Graph) -> Iterator[Finding]:
    explained: set[str] = set()
    for _, row in graph.rows:
        state = graph.examined.states.get(row.of, "")
        slow = state == ProcessState.STARTING and row.since_s >= SLOW_START_S
        if row.kind == WaitKind.PROCESS and not row.of and row.since_s >= SLOW_START_S:
            yield graph.finding(f"{SUPERVISOR}/0", row.what, row)  # No agent reports from a host.
            continue
        if row.kind == WaitKind.STOPPED or (row.kind == WaitKind.PROCESS and (state == ProcessState.BACKOFF or slow)):
            explained.add(row.of)
            silent = graph.examined.answers.get(row.of) is None
            since_s = row.since_s or (graph.examined.silent_s.get(row.of, 0.0) if silent else 0.0)
            yield graph.finding(row.of, row.what, msgspec.structs.replace(row, since_s=since_s))
    for name, answer in graph.examined.answers.items():
        starts = graph.examined.states.get(name) == ProcessState.STARTING
        if answer is None and name not in explained and not starts:
            row = WaitRow(WaitKind.STOPPED, "", graph.examined.silent_s.get(name, 0.0))
            yield graph.finding(name, f"{name} did not answer within {ANSWER_S:g} s", row)


def _stores(graph: _Graph) -> Iterator[Finding]:
    refused: dict[str, WaitRow] = {}
    for _, row in graph.rows:
        if row.kind == WaitKind.REFUSED and row.since_s >= REFUSED_S:
            refused.setdefault(row.of, row)
    for name, row in refused.items():
        room = next((row.what for who, row in graph.rows if who == name and row.kind == WaitKind.ROOM), "")
        yield graph.finding(name, f"{name} is full: {room}" if room else f"{name} refuses requests: {row.what}", row)
    for _, row in graph.rows:
        late = row.kind == WaitKind.CLEAR and row.since_s >= IDLE_S and row.of not in refused
        if late and graph.examined.answers.get(row.of) is not None:
            yield graph.finding(row.of, f"{row.of}: {row.what}", row)


def _services(graph: _Graph) -> Iterator[Finding]:
    for name, answer in graph.examined.answers.items():
        for row in answer.waits if answer is not None else ():
            match row.kind:
                case WaitKind.OUTAGE if not row.of:
                    yield graph.finding(name, f"{name}: {row.what}", row)
                case WaitKind.CODE:
                    late = row.limit_s > 0 and row.since_s >= row.limit_s / 2
                    if row.since_s >= STALL_S and (late or graph.is_stalled(name)):
                        yield graph.finding(name, f"{name}: {row.what}", row)
                case WaitKind.COMPUTE if answer is not None:
                    idle_s = answer.progress_s if answer.progress_s >= 0 else row.since_s
                    if row.since_s >= IDLE_S and idle_s >= IDLE_S:
                        yield graph.finding(name, f"{name} {row.what} and has made no progress for {idle_s:.1f} s", row)
                case _:
                    continue


def _leases(graph: _Graph) -> Iterator[Finding]:
    """Yield a finding for each lease that is making no progress for a reason that its holder does not report."""
    for _, row in graph.rows:
        if row.kind == WaitKind.LEASE and row.since_s >= STALL_S and graph.examined.answers.get(row.of) is not None:
            yield graph.finding(row.of, f"{row.of}: {row.what}; it is lost at the limit and leased again", row)


def _troubles(graph: _Graph) -> Iterator[Finding]:
    for trouble in graph.examined.troubles:
        if trouble.kind in (TroubleKind.REWARDS, TroubleKind.WORKFLOWS, TroubleKind.TRACKER):
            name = service_name(trouble.service, trouble.instance)
            yield graph.finding(name, f"{name}: {trouble.text}")


def _unexplained(graph: _Graph, wrong: list[Finding]) -> Iterator[Finding]:
    """Yield each stall of the next step that no other finding explains."""
    named = {finding.service for finding in wrong}
    for row in graph.stalled:
        service, is_instance = row.of.partition("/")[0], "/" in row.of
        if not row.of or row.of in named or any(name.partition("/")[0] == service for name in named):
            continue
        workers = [name for name in graph.examined.answers if name.partition("/")[0] == service]
        if not workers:
            yield Finding(True, row.of, f"{row.what}, and no {service} is running", row.since_s)
        elif not is_instance and row.since_s >= 2 * STALL_S and not named:
            yield Finding(True, row.of, f"{row.what}, although {', '.join(workers)} answered", row.since_s)


def _notices(graph: _Graph, wrong: list[Finding]) -> Iterator[Finding]:
    """Yield the waits that are not faults in themselves."""
    told_already = {line for finding in wrong for line in (finding.text, *finding.stalls)}
    for name, row in graph.rows:
        poll = row.kind == WaitKind.CALL and row.what in POLLS
        brief = row.since_s < TOLD_S and row.kind not in (*_STATES, WaitKind.ROOM)
        line = f"{name}: {told(row)}"
        if poll or brief or line in told_already or any(row.what in text for text in told_already):
            continue
        yield Finding(False, name, f"{name}: {row.what}" + _of(row), row.since_s, row.limit_s)


def _of(row: WaitRow) -> str:
    return f" to {row.of}" if row.kind in (WaitKind.CALL, WaitKind.REFUSED) else ""


def told(row: WaitRow) -> str:
    """Return one line that describes a wait, its duration so far and its limit."""
    return f"{row.what}{_of(row)}{_times(row.since_s, row.limit_s)}"


def _times(since_s: float, limit_s: float) -> str:
    limit = f" of {limit_s:g} s" if limit_s else ""
    return f" [{since_s:.1f} s{limit}]" if since_s else ""


# ---------------------------------------------------------------------------------------------------- output


def as_document(examined: Examined, findings: list[Finding]) -> dict[str, Any]:
    """Return `{run, step, steps, wrong, notices, waits, processes}` for JSON."""
    rows = [{"process": name, **msgspec.structs.asdict(row)} for name, row in examined.rows()]
    listed = [{**asdict(finding), "stalls": list(finding.stalls)} for finding in findings]
    return {
        "run": examined.run,
        "step": examined.step,
        "steps": examined.steps,
        "wrong": [finding for finding in listed if finding["wrong"]],
        "notices": [finding for finding in listed if not finding["wrong"]],
        "waits": rows,
        "processes": {name: answer is not None for name, answer in examined.answers.items()},
    }


def as_lines(examined: Examined, findings: list[Finding]) -> Iterator[str]:
    """Yield the findings as human-readable lines, causes first."""
    wrong = [finding for finding in findings if finding.wrong]
    at = f"step {examined.step} of {examined.steps}" if examined.step is not None else "the scheduler is not responding"
    count = f"{len(wrong)} cause{'s' if len(wrong) > 1 else ''} found" if wrong else "nothing is wrong"
    yield f"{examined.run}: {at}, {len(examined.answers)} processes, {count}"
    for finding in wrong:
        yield f"WRONG  {finding.text}{_times(finding.since_s, finding.limit_s)}"
        for line in finding.stalls:
            yield f"       <- {line}"
    for finding in findings:
        if not finding.wrong:
            yield f"waits  {finding.text}{_times(finding.since_s, finding.limit_s)}"
