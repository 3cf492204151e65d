"""The view of a run for human readers: the answer to `GetStatus`, and telemetry when values change.

It modifies no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from proto.messages import NextBatch, ServiceRow, Status, TaskState, TroubleKind, TroubleRow, WaitKind, WaitRow
from services.scheduler.events import Tell
from services.scheduler.leases import Holder
from services.scheduler.registry import STORE, Seen
from services.scheduler.run_state import RunState
from services.scheduler.tasks import Task
from shared.rundir import service_name
from shared.stages import TRAIN


def stores_of(seen: Mapping[Holder, Seen]) -> tuple[int, int]:
    """Return the number of bytes and of shards in all stores."""
    stores = [store for (service, _), store in seen.items() if service == STORE]
    return sum(store.store_bytes for store in stores), sum(store.store_shards for store in stores)


def status(run: RunState, seen: Mapping[Holder, Seen], last_row: dict[str, float], now: float) -> Status:
    """Return the status of the run at `now`, with a row for each registered instance."""
    nbytes, shards = stores_of(seen)
    rows = []
    for (service, instance), row in run.shards.registry.items():
        one = seen.get((service, instance), Seen(now))
        rows.append(
            ServiceRow(
                service=service,
                instance=instance,
                state=one.state,
                pid=row.pid,
                host=row.host,
                incarnation=row.incarnation,
                heartbeat_age_s=max(now - one.at, 0.0),
                rss_bytes=one.rss_bytes,
                endpoint=row.endpoint,
            )
        )
    return Status(
        run=run.plan.run,
        step=run.history.committed_step,
        steps=run.history.config.steps,
        lineage=run.history.lineage,
        version=run.history.versions.newest[1] if run.history.versions.newest else 0,
        services=rows,
        tasks={str(state): count for state, count in run.ledger.tasks.counts.items()},
        store_bytes=nbytes,
        store_limit_bytes=run.shards.limit_bytes,
        store_shards=shards,
        last_row=last_row,
        troubles=troubles(seen),
        dropped=dict(run.ledger.losses.dropped),
        lost=dict(run.ledger.losses.lost),
        last_drop=run.ledger.last_drop,
    )


def troubles(seen: Mapping[Holder, Seen]) -> list[TroubleRow]:
    """Return the problems that services report, ordered by service and instance."""
    return [
        TroubleRow(service, instance, trouble.kind, trouble.text)
        for (service, instance), one in sorted(item for item in seen.items() if item[1].troubles)
        for trouble in one.troubles
    ]


def waits(
    run: RunState,
    seen: Mapping[Holder, Seen],
    awaited: Mapping[tuple[str, int], float],
    idle: Mapping[int, float],
    lease_s: float,
    clearing: Mapping[str, float],
) -> list[WaitRow]:
    """Return one row for each thing that the run is waiting for.

    Three mappings hold elapsed seconds: `awaited` since the driver first made a deferred request, by (request, step);
    `idle` since the last progress of a lease, by id; and `clearing` since an unacknowledged clear was sent, by store.
    """
    rows: list[WaitRow] = []
    for (request, step), since_s in awaited.items():
        if request == NextBatch.__name__:
            rows += _step_waits(run, step, since_s)
        else:
            rows += _evaluation_waits(run, step, since_s)
    for lease_id, idle_s in idle.items():
        lease = run.ledger.leases.get(lease_id)
        if lease is not None:
            what = (
                f"lease {lease_id} ({run.plan.stages[lease.stage].name}, {len(lease.tasks)} tasks) "
                "is making no progress"
            )
            rows.append(WaitRow(WaitKind.LEASE, what, idle_s, lease_s, service_name(*lease.holder)))
    for store, since_s in clearing.items():
        what = f"{len(run.shards.clears.queues[store])} clears are not acknowledged"
        rows.append(WaitRow(WaitKind.CLEAR, what, since_s, 0.0, store))
    for holder, one in sorted(seen.items()):
        for trouble in one.troubles:
            if trouble.kind == TroubleKind.JUDGE:
                text = f"nothing is leased: {trouble.text}"
                rows.append(WaitRow(WaitKind.OUTAGE, text, 0.0, 0.0, service_name(*holder)))
    room, wanted = run.ledger.room_for_tasks(), run.plan.max_live - len(run.history.open_batch)
    if run.plan.task_bytes and room < wanted:
        text = f"the stores have room for {max(room, 0)} of the {wanted} tasks that may be live"
        if run.shards.uncovered_bytes:
            text += f"; a checkpoint frees {run.shards.uncovered_bytes} bytes"
        rows.append(WaitRow(WaitKind.ROOM, f"{text} (services.batch-store.memory)", 0.0))
    return rows


def _step_waits(run: RunState, step: int, since_s: float) -> Iterator[WaitRow]:
    """Yield a row for each process or service that the tasks of the next step are waiting for."""
    wanted = run.plan.tasks_per_step
    members = run.ledger.window.tasks.values()
    first = members if run.plan.by_completion else islice(members, wanted)
    late = [task for task in first if task.state != TaskState.READY]
    groups: dict[tuple[str, str], list[Task]] = {}
    for task in late:
        groups.setdefault(_waited_for(run, task), []).append(task)
    for (doing, of), tasks in groups.items():
        names = ", ".join(task.task_id for task in tasks[:3]) + (", ..." if len(tasks) > 3 else "")
        text = f"step {step} is waiting for {len(tasks)} of {wanted} tasks that {doing} ({names})"
        yield WaitRow(WaitKind.STEP, text, since_s, 0.0, of)


def _evaluation_waits(run: RunState, step: int, since_s: float) -> Iterator[WaitRow]:
    waiting = sum(len(one.waiting) for one in run.history.evaluations.open.values())
    leased: Counter[Holder] = Counter()
    for lease in run.ledger.leases:
        leased[lease.holder] += sum(task.split != TRAIN for task in lease.tasks.values())
    if unscored := len(run.ledger.unscored()):
        service = run.plan.stages[run.plan.reward_stage].service
        text = f"the evaluation of version {step} is waiting for {unscored} tasks that no {service} has leased"
        yield WaitRow(WaitKind.STEP, text, since_s, 0.0, service)
    for holder, count in leased.items():
        if count:
            name = service_name(*holder)
            text = f"the evaluation of version {step} is waiting for {count} tasks that are leased to {name}"
            yield WaitRow(WaitKind.STEP, text, since_s, 0.0, name)
    if waiting:
        text = f"the evaluation of version {step} is waiting for {waiting} tasks that no one has leased"
        yield WaitRow(WaitKind.STEP, text, since_s, 0.0, "rollout")


def _waited_for(run: RunState, task: Task) -> tuple[str, str]:
    """Return a phrase that says where an unready task is, and the process or service that the task is waiting for."""
    lease = run.ledger.leases.get(task.lease)
    if lease is not None:
        holder = service_name(*lease.holder)
        return f"are leased to {holder} for {run.plan.stages[lease.stage].name}", holder
    for index, stage in enumerate(run.plan.stages):
        if run.ledger.is_waiting(index, task):
            return f"no {stage.service} has leased for {stage.name}", stage.service
    return f"are {task.state}", ""


class Teller:
    """Publishes the values of a topic only when they change."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, float | str]] = {}

    def tell(self, topic: str, values: dict[str, float | str]) -> list[Tell]:
        """Return the effect, or [] if the topic's values have not changed since the last call."""
        if self._told.get(topic) == values:
            return []
        self._told[topic] = values
        return [Tell(topic, values)]

    def state(self, run: RunState, *, waiting: int, bad_rows: int) -> list[Tell]:
        """Return telemetry about tasks, leases and collection. `waiting` is the number of deferred lease requests."""
        ledger = run.ledger
        tasks = {str(state): float(count) for state, count in ledger.tasks.counts.items()}
        leased = Counter(lease.stage for lease in ledger.leases)
        stages = {f"stage/{stage.name}": float(leased[index]) for index, stage in enumerate(run.plan.stages)}
        dropped = float(sum(ledger.losses.dropped.values()) + bad_rows)
        collected = float(ledger.tasks.counts[TaskState.COLLECTED])
        pending = float(sum(map(len, run.shards.clears.queues.values())))
        return [
            *self.tell("scheduler/tasks", {**tasks, "dropped": dropped}),
            *self.tell("scheduler/leases", {"live": float(len(ledger.leases)), "waiting": float(waiting), **stages}),
            *self.tell("scheduler/gc", {"collected": collected, "pending": pending}),
        ]
