"""Conversion of the durable state to bytes and back, with msgpack and without pickle. The module is pure.

The whole state is packed at once. A topology limits the number of live tasks (`shared.topology.checks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from proto import codec
from proto.messages import PublishWeights, Register, TaskState
from services.scheduler.evaluations import Evaluations
from services.scheduler.events import Configure
from services.scheduler.leases import TaskLease
from services.scheduler.losses import Losses
from services.scheduler.plan import Plan
from services.scheduler.records import Due
from services.scheduler.run_state import RunState
from services.scheduler.scalars import Layout
from services.scheduler.shards import QueuedClear
from services.scheduler.tasks import Task

LAYOUT = 15
"""Version of the journal, raised with every change to its tables or to what `dump` writes. Other versions are refused,
except the previous one, which only had one more table (`Journal`)."""
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
    for store, entries in run.shards.clears.entries().items():
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
        weights=[codec.encode_body(PublishWeights(driver=0, ref=ref)) for ref in history.versions.refs],
        evaluations=history.evaluations,
        losses=ledger.losses,
        layouts=ledger.layouts,
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
    ledger.restore(head.values, head.losses, head.layouts)
    return run
