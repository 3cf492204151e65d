"""Conversion of the durable state to bytes and back, with msgpack and without pickle. The module is pure.

A snapshot shows the run at the moment when the snapshot begins. Everything except tasks and clears is packed at once.
The tasks are packed part by part while the run continues, and a task that changes in the meantime is copied first
(`Tasks.edit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

import msgspec

from proto import codec
from proto.messages import PublishWeights, Register, TaskState
from services.scheduler.collection import Entry
from services.scheduler.evaluations import Evaluations
from services.scheduler.events import Configure
from services.scheduler.leases import TaskLease
from services.scheduler.losses import Losses
from services.scheduler.plan import Plan
from services.scheduler.records import Due
from services.scheduler.run_state import RunState
from services.scheduler.scalars import Layout
from services.scheduler.stores import trainer_stores
from services.scheduler.tasks import Row

LAYOUT = 14
"""Version of the journal, raised with every change to its tables or to what `begin` writes. Other versions are
refused."""
PART_ROWS = 2048

_VALUES = (
    "position", "highest_fence", "driver", "old_drivers", "lineage", "batched_step", "committed_step",
    "checkpoint_step", "finished", "broken", "uncovered", "gone", "eval_lease_debt", "next_row", "store_names",
    "reopened", "checked", "stale", "lost_version",
)  # fmt: skip
"""Attributes of `RunState` that are packed unchanged."""


class _Head(msgspec.Struct):
    """Everything but tasks and clears. The waiting lines are left out because they follow from the tasks."""

    values: dict[str, Any]
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


def begin(run: RunState) -> Iterator[bytes]:
    """Return an iterator over the parts of a snapshot of the run as it is now. Only one snapshot may be in progress at
    a time."""
    return _parts(_head(run), run.tasks.begin_copy(), run.clears.entries())


def dump(run: RunState) -> list[bytes]:
    """Return all parts of a snapshot. The parts are equal for two runs with the same history."""
    return list(_parts(_head(run), run.tasks.rows(), run.clears.entries()))


def _parts(head: bytes, tasks: Iterator[Row], clears: dict[str, list[Entry]]) -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    yield head
    while rows := list(islice(tasks, PART_ROWS)):
        yield encode(["", rows])
    for store, entries in clears.items():
        for at in range(0, max(len(entries), 1), PART_ROWS):
            yield encode([store, entries[at : at + PART_ROWS]])


def _head(run: RunState) -> bytes:
    head = _Head(
        values={name: getattr(run, name) for name in _VALUES},
        config=run.config,
        registry=list(run.registry.values()),
        collected=run.tasks.counts[TaskState.COLLECTED],
        least_fence=run.tasks.least_fence,
        window=(run.window.head, run.window.tail, list(run.window.finished)),
        next_lease=run.leases.next_id,
        leases=[
            (one.lease_id, one.stage, one.holder, one.incarnation, one.version, one.call, list(one.tasks))
            for one in run.leases
        ],
        weights=[codec.encode_body(PublishWeights(driver=0, ref=ref)) for ref in run.versions.refs],
        evaluations=run.evaluations,
        losses=run.losses,
        layouts=run.layouts,
        batches={step: [task.task_id for task in tasks] for step, tasks in run.batches.items()},
        identities=run.identities,
        waiting_rows=run.waiting_rows,
        due=run.records.due,
        rewinds=run.records.rewinds,
        samples_lost=run.records.lost,
    )
    return msgspec.msgpack.encode(head)


def load(plan: Plan, parts: Iterable[bytes]) -> RunState:
    """Rebuild a run from the parts of a snapshot. Raises MsgspecError, KeyError, ValueError or TypeError for invalid
    bytes."""
    rest = iter(parts)
    head = msgspec.msgpack.decode(next(rest, b""), type=_Head)
    run = RunState(plan)
    for name in _VALUES:
        setattr(run, name, head.values[name])
    run.config = head.config
    for row in head.registry:
        run.registry.put(row)
    run.tasks.counts[TaskState.COLLECTED] = head.collected
    run.tasks.least_fence = head.least_fence
    for part in rest:
        store, rows = msgspec.msgpack.decode(part)
        if store:
            run.clears.extend(store, map(tuple, rows))
        else:
            for row in rows:
                run.tasks.load(row)
    for packed in head.weights:
        run.versions.put(cast(PublishWeights, codec.decode_body(PublishWeights.TYPE, packed)).ref)
    first, last, finished = head.window
    run.window.restore(first, last, run.tasks, finished)
    for lease_id, stage, holder, incarnation, version, call, names in head.leases:
        held = {name: run.tasks.known(name) for name in names}
        run.leases.add(TaskLease(lease_id, stage, holder, incarnation, version, call, held))
    run.leases.next_id = head.next_lease
    run.evaluations, run.losses, run.layouts = head.evaluations, head.losses, head.layouts
    run.batches = {step: [run.tasks.known(name) for name in names] for step, names in head.batches.items()}
    run.identities, run.waiting_rows = head.identities, head.waiting_rows
    run.records.load(head.due, head.rewinds, head.samples_lost)
    run.trainer_stores = trainer_stores(run)
    run.line_up()
    return run
