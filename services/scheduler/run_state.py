"""The durable state of a run: everything that the journal rebuilds, from events or from a snapshot. It has no clock, no
I/O and no open calls.

Three owners hold the state: `StoredShards` knows the stores and their clears, `RunHistory` the steps, versions and
evaluations, and `TaskLedger`, which uses the other two, the tasks and their leases. Only an owner's own methods change
its fields. The rules for a subject that concerns several owners are functions in a module named after the subject.

An event that is refused raises RpcError before it changes anything. Applying the same events in the same order produces
the same state, bit for bit. Heartbeats, time and waiting calls are therefore handled in `state.py`.

A snapshot is the whole state, packed at once with msgpack and without pickle. A topology limits the number of live
tasks (`shared.topology.checks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, assert_never, cast

import msgspec

from proto import codec
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    Complete,
    CompleteAck,
    FinishRun,
    GetRunInfo,
    HoldShards,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    Register,
    ReleaseShards,
    RunInfo,
    StepBatch,
    TaskState,
)
from services.scheduler import completion, leasing, recovery, steps
from services.scheduler.ended import Due, Losses
from services.scheduler.evaluations import Evaluations
from services.scheduler.events import (
    Cleared,
    Configure,
    Durable,
    Effect,
    Leased,
    LeaseExpired,
    SamplesTaken,
    ShardsLost,
    StoreGone,
    TailLost,
)
from services.scheduler.history import RunHistory
from services.scheduler.leases import CallId, TaskLease
from services.scheduler.ledger import TaskLedger
from services.scheduler.orders import order_of
from services.scheduler.plan import Plan
from services.scheduler.shards import QueuedClear, StoredShards
from services.scheduler.tasks import Layout, Task

Reply = LeaseGrant | CompleteAck | StepBatch | RunInfo | Ack


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of an event: the reply to its sender, and the effects.

    Without a reply, nothing changed, so the event is not journaled.
    """

    reply: Reply | None
    effects: list[Effect]


class RunState:
    """The three owners of the state of one run, and the way of each event to them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.shards = StoredShards(plan)
        self.history = RunHistory(plan)
        self.ledger = TaskLedger(plan, order_of(plan), self.history, self.shards)

    # ---- events

    def apply(self, event: Durable) -> Applied:
        """Apply one durable event, live or replayed. Raises RpcError, and changes nothing, if the event is refused."""
        self.ledger.tasks.cause = type(event).__name__
        return self._applied(self._apply(event))

    def lease(self, request: LeaseRequest, call: CallId) -> Applied:
        """Apply an unencoded lease request, with the same effect as `apply(Leased(...))`."""
        self.ledger.tasks.cause = Leased.__name__
        return self._applied(leasing.lease(self.ledger, request, call))

    def _applied(self, reply: Reply | None) -> Applied:
        if reply is None:
            return Applied(None, [])
        self.ledger.admit()
        return Applied(reply, [*self.history.take_effects(), *self.ledger.take_effects()])

    def _apply(self, event: Durable) -> Reply | None:
        changed = True
        match event:
            case Leased():
                request = cast(LeaseRequest, codec.decode_body(LeaseRequest.TYPE, event.request))
                return leasing.lease(self.ledger, request, event.call)
            case Complete():
                return CompleteAck(refused=completion.complete(self.ledger, event))
            case NextBatch():
                return steps.form_batch(self.ledger, event)
            case GetRunInfo():
                return steps.take_over(self.ledger, event)
            case CommitStep():
                changed = steps.commit(self.ledger, event)
            case PublishWeights():
                steps.publish(self.ledger, event)
            case CheckpointSaved():
                steps.checkpoint(self.ledger, event)
            case FinishRun():
                self.history.finish(event.driver)
            case HoldShards():
                self.history.check_driver(event.driver)
                changed = self.shards.holds.hold(event)
            case ReleaseShards():
                self.history.check_driver(event.driver)
                changed = self.shards.release(event)
            case Register():
                recovery.register(self.ledger, event)
            case Configure():
                self.history.configure(event)
            case LeaseExpired():
                changed = recovery.expire(self.ledger, event.lease_id, not_started=event.not_started)
            case Cleared():
                self.ledger.cleared(event.store, event.count)
            case StoreGone():
                changed = recovery.remove_departed_store(self.ledger, event.store)
            case TailLost():
                recovery.lose_tail(self.ledger, event)
            case ShardsLost():
                changed = recovery.lose_shards(self.ledger, event)
            case SamplesTaken():
                changed = self.ledger.take_samples(event.tasks, lost=event.lost)
            case _:
                assert_never(event)
        return Ack() if changed else None


LAYOUT = 16
"""Version of the journal, raised with every change to its tables or to what `dump` writes. Other versions are refused,
except those that `earlier_journal` converts."""
PART_ROWS = 2048


class _Head(msgspec.Struct):
    """Everything but tasks and clears. The waiting lines are left out because they follow from the tasks."""

    values: dict[str, Any]
    """The values that the owners store unchanged (`saved`)."""
    config: Configure
    registry: list[Register]
    collected: int
    least_fence: int
    window: tuple[int, int, list[int]]
    """Head, tail, and the admission numbers of the READY tasks."""
    next_lease: int
    leases: list[tuple[int, int, tuple[str, int], int, tuple[int, int] | None, tuple[int, int], list[str]]]
    weights: list[bytes]
    evaluations: Evaluations
    losses: Losses
    layouts: list[Layout]
    batches: dict[int, list[str]]
    identities: dict[int, list[str]]
    waiting_rows: dict[int, dict[str, float]]
    due: dict[str, Due]
    rewinds: list[tuple[int, int]]
    samples_lost: int


def dump(run: RunState) -> list[bytes]:
    """Return the parts of a snapshot. They are equal for two runs with the same history."""
    encode = msgspec.msgpack.encode
    tasks = list(run.ledger.tasks)
    parts = [_head(run), *(encode(["", tasks[at : at + PART_ROWS]]) for at in range(0, len(tasks), PART_ROWS))]
    for store, queue in run.shards.clears.queues.items():
        entries = list(queue)
        parts += [encode([store, entries[at : at + PART_ROWS]]) for at in range(0, max(len(entries), 1), PART_ROWS)]
    return parts


def _head(run: RunState) -> bytes:
    ledger, history, shards = run.ledger, run.history, run.shards
    head = _Head(
        values=shards.saved() | history.saved() | ledger.saved(),
        config=history.config,
        registry=list(shards.registry.values()),
        collected=ledger.tasks.counts[TaskState.COLLECTED],
        least_fence=ledger.tasks.least_fence,
        window=(ledger.window.head, ledger.window.tail, list(ledger.window.finished)),
        next_lease=ledger.leases.next_id,
        leases=[
            (one.lease_id, one.stage, one.holder, one.incarnation, one.version, one.call, list(one.tasks))
            for one in ledger.leases
        ],
        weights=[codec.encode_body(PublishWeights(driver=0, ref=ref)) for ref in history.versions.refs.values()],
        evaluations=history.evaluations,
        losses=ledger.losses,
        layouts=ledger.tasks.layouts,
        batches={step: [task.task_id for task in tasks] for step, tasks in history.batches.items()},
        identities=history.identities,
        waiting_rows=history.waiting_rows,
        due=ledger.records.due,
        rewinds=ledger.records.rewinds,
        samples_lost=ledger.records.lost,
    )
    return msgspec.msgpack.encode(head)


def load(plan: Plan, parts: Iterable[bytes]) -> RunState:
    """Rebuild a run from the parts of a snapshot. Raises MsgspecError, KeyError, ValueError or TypeError for invalid
    bytes."""
    rest = iter(parts)
    head = msgspec.msgpack.decode(next(rest, b""), type=_Head)
    run = RunState(plan)
    ledger, history, shards = run.ledger, run.history, run.shards
    shards.restore(head.values, head.registry)
    ledger.tasks.counts[TaskState.COLLECTED] = head.collected
    ledger.tasks.least_fence = head.least_fence
    ledger.tasks.layouts = head.layouts
    for part in rest:
        store, rows = msgspec.msgpack.decode(part, type=tuple[str, msgspec.Raw])
        if store:
            shards.clears.extend(store, msgspec.msgpack.decode(rows, type=list[QueuedClear]))
        else:
            for task in msgspec.msgpack.decode(rows, type=list[Task]):
                ledger.tasks.load(task)
    for packed in head.weights:
        history.versions.put(cast(PublishWeights, codec.decode_body(PublishWeights.TYPE, packed)).ref)
    batches = {step: [ledger.tasks[name] for name in names] for step, names in head.batches.items()}
    history.restore(head.values, head.config, batches, head.identities, head.waiting_rows, head.evaluations)
    first, last, finished = head.window
    ledger.window.restore(first, last, ledger.tasks, finished)
    for lease_id, stage, holder, incarnation, version, call, names in head.leases:
        granted = {name: ledger.tasks[name] for name in names}
        ledger.leases.add(TaskLease(lease_id, stage, holder, incarnation, version, call, granted))
    ledger.leases.next_id = head.next_lease
    ledger.records.load(head.due, head.rewinds, head.samples_lost)
    ledger.restore(head.values, head.losses)
    return run
