"""`ctl trace`: the story of one task across processes, from the scheduler's journal and the logs. It changes nothing.

The journal is replayed up to its current end with the scheduler's own rules, and every event that changed the task is
reported with its time and cause. A compacted journal begins with a snapshot. For tasks that had been collected by then,
the snapshot records only the steps.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from launch.processes.plan import SUPERVISOR
from proto.messages import (
    CommitStep,
    Complete,
    CompleteAck,
    ErrorCode,
    NextBatch,
    Outcome,
    Refusal,
    Register,
    Story,
    StoryRow,
    TaskState,
)
from services.scheduler import run_state
from services.scheduler.events import Cleared, Durable, LeaseExpired, StoreGone
from services.scheduler.journal_files import Recorded, reading
from services.scheduler.leases import TaskLease
from services.scheduler.planning import make_plan
from services.scheduler.run_state import RunState
from services.scheduler.tasks import StagePart, Task
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.topology import TopologyError, load

SCHEDULER = "scheduler/0"
MOST_ROWS = 2000
"""Maximum number of entries that are sent to another machine."""
_HIDDEN = frozenset({"timestamp", "level", "event", "service", "instance", "incarnation", "run", "exception"})
_ENDS = frozenset({"exited", "process died", "killed", "to be killed"})
"""Events in the supervisor's log about the end of a process. The field `name` holds the name of the process."""


@dataclass(frozen=True)
class StoryEntry:
    """One event of a story. `at` is in seconds since 1970, or None before the journal's first event."""

    at: float | None
    service: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)


class _Seen(NamedTuple):
    """The fields of a task that an event may change."""

    state: TaskState
    fence: int
    lease: int
    parts: tuple[StagePart | None, ...]
    clears: int


@dataclass
class PastLease:
    """A lease that held the task, used to find log lines about the lease and its holder."""

    lease_id: int
    holder: str
    begin: float
    end: float


def story(run: RunDir, task_id: str) -> list[StoryEntry]:
    """Return the story of a task, oldest entry first.

    Raises a one-line RpcError(bad_request) if the journal cannot be read or has no such task.
    """
    with reading(run.journal) as recorded:
        entries, leases = replayed(_beginning(run, recorded), task_id, recorded)
        forgotten = recorded.forgotten
        told = {entry.facts["step"] for entry in entries if entry.what == "trained"}
        for step, kind, committed_at in recorded.steps_of(task_id):
            if step not in told and committed_at is not None:
                entries.append(StoryEntry(committed_at, SCHEDULER, "trained", {"step": step, "now": kind}))
    entries += _logged(run, task_id, leases)
    if not entries:
        text = f"task {task_id!r}: the journal of run {run.path} has no such task; ids are <split>/<epoch>/<row>"
        if forgotten > 0:
            text += f"; the journal no longer has the tasks of steps 1 to {forgotten}"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    return sorted(entries, key=lambda entry: entry.at or 0.0)


def _beginning(run: RunDir, recorded: Recorded) -> RunState:
    """Return the state before the first event of the journal. Raises a one-line RpcError(bad_request)."""
    try:
        plan, _ = make_plan(load(run.topology), run.topology)
        parts = recorded.snapshot()
        return run_state.load(plan, parts) if parts else RunState(plan)
    except TopologyError as error:
        causes = "; ".join(str(error).splitlines())
        text = f"journal {run.journal}: cannot be replayed, because the run's topology is invalid: {causes}"
        raise RpcError(ErrorCode.BAD_REQUEST, text) from None
    except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
        text = f"journal {run.journal}: snapshot cannot be read ({error}); use the release that wrote it"
        raise RpcError(ErrorCode.BAD_REQUEST, text) from None


def replayed(state: RunState, task_id: str, recorded: Recorded) -> tuple[list[StoryEntry], list[PastLease]]:
    """Apply the events of a journal to `state`. Return the history of one task, and the leases that held it."""
    return _Replay(state, task_id).run(recorded)


class _Replay:
    """Replays the events of a journal and records their effects on one task."""

    def __init__(self, state: RunState, task_id: str) -> None:
        self._state = state
        self._task_id = task_id
        self._entries: list[StoryEntry] = []
        self._held: list[PastLease] = []

    def run(self, recorded: Recorded) -> tuple[list[StoryEntry], list[PastLease]]:
        """Return the entries, and the leases that held the task."""
        before = self._look()
        if before is not None:
            facts = {"state": str(before.state), "fence": before.fence, "samples": self._task.samples}
            self._entries.append(StoryEntry(None, SCHEDULER, "known from the journal's snapshot", facts))
            self._note_lease(before, 0.0)
        for at, event in recorded.events():
            lease = self._state.ledger.leases.get(before.lease) if before is not None else None
            reply = self._state.apply(event).reply
            if isinstance(event, Complete) and isinstance(reply, CompleteAck):
                self._refused(at, event, reply.refused, lease)
            after = self._look()
            if after != before:
                self._changed(at, event, before, after, lease)
                before = after
        return self._entries, self._held

    @property
    def _task(self) -> Task:
        return self._state.ledger.tasks[self._task_id]

    def _look(self) -> _Seen | None:
        task = self._state.ledger.tasks.find(self._task_id)
        return None if task is None else _Seen(task.state, task.fence, task.lease, task.parts, task.clears)

    def _tell(self, at: float, what: str, who: str = SCHEDULER, **facts: Any) -> None:
        self._entries.append(StoryEntry(at, who, what, facts))

    def _changed(
        self, at: float, event: Durable, before: _Seen | None, after: _Seen | None, lease: TaskLease | None
    ) -> None:
        if before is not None and before.lease and (after is None or after.lease != before.lease):
            self._held[-1].end = at
        if after is None:
            self._acknowledged(at, event)
            self._tell(at, "collected", fence=before.fence if before is not None else 0)
            return
        if before is None:
            self._tell(at, "admitted", fence=after.fence)
        elif after.fence > before.fence:
            self._tell(at, "to be sampled again", fence=after.fence, because=_cause(event, self._task_id, lease))
        else:
            self._progressed(at, event, before, after, lease)
        if after.lease and (before is None or after.lease != before.lease):
            self._leased(at, after)

    def _progressed(self, at: float, event: Durable, before: _Seen, after: _Seen, lease: TaskLease | None) -> None:
        for stage, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
            if new is not None and old is None:
                holder = service_name(*lease.holder) if lease is not None else SCHEDULER
                plan, task = self._state.plan.stages[stage], self._task
                self._tell(
                    at,
                    f"{plan.name} completed",
                    holder,
                    fence=after.fence,
                    store=self._state.shards.store_names[new.store],
                    keys=list(plan.makes),
                    bytes=new.nbytes,
                    samples=task.samples,
                    tokens=task.tokens,
                    **({"failed_samples": task.failed} if task.failed else {}),
                )
        if after.state not in (before.state, TaskState.LEASED):  # A lease is reported with its holder.
            facts: dict[str, Any] = {}
            if isinstance(event, NextBatch | CommitStep):
                facts["step"] = event.step
            if isinstance(event, CommitStep) and "time/step" in event.metrics:
                facts["step_s"] = round(event.metrics["time/step"], 3)
            if after.state == TaskState.DROPPED:
                facts["because"] = _cause(event, self._task_id, lease)
            self._tell(at, _WHAT.get(after.state, str(after.state).lower()), fence=after.fence, **facts)
        if after.clears < before.clears:
            self._acknowledged(at, event)
        elif after.clears > before.clears:
            self._tell(at, "to be cleared", fence=after.fence, stores=after.clears, because=type(event).__name__)

    def _acknowledged(self, at: float, event: Durable) -> None:
        if isinstance(event, Cleared):
            self._tell(at, "cleared", event.store)

    def _leased(self, at: float, after: _Seen) -> None:
        lease = self._note_lease(after, at)
        if lease is None:
            return
        version = {} if lease.version is None else {"lineage": lease.version[0], "version": lease.version[1]}
        stage = self._state.plan.stages[lease.stage].name
        others = len(lease.tasks) - 1
        self._tell(
            at, f"leased for {stage}", service_name(*lease.holder),
            lease=lease.lease_id, fence=after.fence, **version, with_others=others,
        )  # fmt: skip

    def _note_lease(self, seen: _Seen, at: float) -> TaskLease | None:
        lease = self._state.ledger.leases.get(seen.lease)
        if lease is not None:
            self._held.append(PastLease(lease.lease_id, service_name(*lease.holder), at, time.time()))
        return lease

    def _refused(self, at: float, event: Complete, refused: Iterable[Refusal], lease: TaskLease | None) -> None:
        for refusal in refused:
            if refusal.task_id == self._task_id:
                holder = service_name(*lease.holder) if lease is not None else SCHEDULER
                facts = {
                    "lease": event.lease_id,
                    "fence": refusal.fence,
                    "code": refusal.code,
                    "because": refusal.message,
                }
                self._tell(at, f"{event.stage} refused", holder, **facts)


_WHAT: Final = {
    TaskState.ROLLED_OUT: "waiting for its next stage",
    TaskState.READY: "ready",
    TaskState.BATCHED: "batched",
    TaskState.TRAINED: "trained",
    TaskState.SCORED: "scored",
    TaskState.DROPPED: "dropped",
    TaskState.COLLECTED: "collected",
}


def _cause(event: Durable, task_id: str, lease: TaskLease | None) -> str:
    """Return the reason why an event ended an attempt at a task."""
    holder = f"lease {lease.lease_id} of {service_name(*lease.holder)}" if lease is not None else "it"
    match event:
        case LeaseExpired():
            return f"{holder} made no progress" + (" and had not begun" if event.not_started else "")
        case Register():
            return f"{service_name(event.service, event.instance)} restarted (pid {event.pid})"
        case StoreGone():
            return f"{event.store} is gone"
        case Complete():
            for result in event.results:
                if result.task_id == task_id:
                    reason = result.reason or result.why or "its results were not usable"
                    return f"{Outcome(result.outcome).name.lower()}: {reason}"
            return f"{holder} was handed back" + (" before its work began" if event.untouched else "")
        case _:
            return type(event).__name__


# ------------------------------------------------------------------------------------------------------- logs


def _logged(run: RunDir, task_id: str, held: list[PastLease]) -> Iterator[StoryEntry]:
    """Yield the log lines about the task and its leases, and those about lease holders that ended while they held the
    task."""
    named = re.compile(rf"(?<![\w/-]){re.escape(task_id)}(?![\w/])")
    for path in sorted(run.logs.glob("*.jsonl")):
        for line in _lines(path):
            about_task = task_id in line and named.search(line) is not None
            if not about_task and '"lease_id"' not in line and not path.name.startswith(SUPERVISOR):
                continue
            entry = _parsed(line)
            if entry is not None and (about_task or _concerns(entry, held)):
                yield entry


def _concerns(entry: StoryEntry, held: list[PastLease]) -> bool:
    at = entry.at or 0.0
    if entry.service == f"{SUPERVISOR}/0":
        ended = entry.what in _ENDS and entry.facts.get("name")
        return any(ended == lease.holder and lease.begin <= at <= lease.end for lease in held)
    lease_id = entry.facts.get("lease_id")
    return any(lease_id == lease.lease_id and entry.service == lease.holder for lease in held)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(errors="replace") as file:
            yield from file
    except OSError:
        return


def _parsed(line: str) -> StoryEntry | None:
    try:
        entry = json.loads(line)
        at = datetime.fromisoformat(entry["timestamp"]).timestamp()
        service = service_name(str(entry["service"]), int(entry["instance"]))
        facts = {key: value for key, value in entry.items() if key not in _HIDDEN and value not in ("", None)}
        return StoryEntry(at, service, str(entry["event"]), facts)
    except (ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------------ output


def to_message(entries: Iterable[StoryEntry]) -> Story:
    """Return the newest entries as a message."""
    rows = [
        StoryRow(entry.at or 0.0, entry.service, entry.what, {key: _text(value) for key, value in entry.facts.items()})
        for entry in entries
    ]
    return Story(rows=rows[-MOST_ROWS:])


def from_message(told: Story) -> list[StoryEntry]:
    """Return the entries of a message, with the facts as text."""
    return [StoryEntry(row.at or None, row.service, row.what, dict(row.facts)) for row in told.rows]


def as_rows(entries: Iterable[StoryEntry]) -> list[dict[str, Any]]:
    """Return the entries for JSON: `{at, service, what, facts}`."""
    return [asdict(entry) for entry in entries]


def from_rows(rows: Iterable[dict[str, Any]]) -> list[StoryEntry]:
    """Return the entries that `as_rows` described."""
    return [StoryEntry(**row) for row in rows]


def as_lines(entries: Iterable[StoryEntry]) -> Iterator[str]:
    """Yield a line for each entry: local time, seconds since the first entry, process, event and facts."""
    first: float | None = None
    for entry in entries:
        facts = "  ".join(f"{key} {_text(value)}" for key, value in entry.facts.items())
        if entry.at is None:
            when, since = "-", ""
        else:
            first = entry.at if first is None else first
            when = datetime.fromtimestamp(entry.at).strftime("%m-%d %H:%M:%S.%f")[:-3]
            since = f"{entry.at - first:+.3f} s"
        yield f"{when:<18} {since:>12}  {entry.service:<24} {entry.what:<24} {facts}".rstrip()


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
