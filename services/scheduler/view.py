"""The view of a run for people: the answer to `GetStatus`, and telemetry when it changes. It modifies no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proto.messages import ServiceRow, Status, Trouble, TroubleRow
from services.scheduler.events import Tell
from services.scheduler.leases import Holder
from services.scheduler.run_state import RunState
from services.scheduler.stores import STORE
from services.scheduler.tasks import TaskState


@dataclass
class Seen:
    """The last heartbeat of an instance."""

    at: float
    state: str = "STARTING"
    rss_bytes: int = 0
    store_bytes: int = 0
    store_shards: int = 0
    troubles: list[Trouble] = field(default_factory=list)


def stores_of(seen: Mapping[Holder, Seen]) -> tuple[int, int]:
    """Return the bytes and shards of all stores."""
    held = [each for (service, _), each in seen.items() if service == STORE]
    return sum(each.store_bytes for each in held), sum(each.store_shards for each in held)


def status(run: RunState, seen: Mapping[Holder, Seen], last_row: dict[str, float], now: float) -> Status:
    """Return the status of the run at `now`, with a row for each registered instance."""
    nbytes, shards = stores_of(seen)
    rows = []
    for (service, instance), row in run.registry.items():
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
        step=run.committed_step,
        steps=run.config.steps,
        lineage=run.lineage,
        version=run.versions.newest[1] if run.versions.newest else 0,
        services=rows,
        tasks={str(state): count for state, count in run.tasks.counts.items()},
        store_bytes=nbytes,
        store_limit_bytes=run.limit_bytes,
        store_shards=shards,
        last_row=last_row,
        troubles=troubles(seen),
        dropped=dict(run.losses.dropped),
        lost=dict(run.losses.lost),
        last_drop=run.last_drop,
    )


def troubles(seen: Mapping[Holder, Seen]) -> list[TroubleRow]:
    """Return the troubles that services report, ordered by service and instance."""
    return [
        TroubleRow(service, instance, each.kind, each.text)
        for (service, instance), one in sorted(seen.items())
        for each in one.troubles
    ]


class Teller:
    """Publishes the values of a topic only when they change."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, float | str]] = {}

    def tell(self, topic: str, values: dict[str, float | str]) -> list[Tell]:
        """Return the effect, or nothing if these values were the last ones."""
        if self._told.get(topic) == values:
            return []
        self._told[topic] = values
        return [Tell(topic, values)]

    def state(self, run: RunState, *, waiting: int, bad_rows: int) -> list[Tell]:
        """Return telemetry about tasks, leases and collection. `waiting` is the number of deferred lease requests."""
        tasks = {str(state): float(count) for state, count in run.tasks.counts.items()}
        return [
            *self.tell("scheduler/tasks", {**tasks, "dropped": float(sum(run.losses.dropped.values()) + bad_rows)}),
            *self.tell("scheduler/leases", {"live": float(len(run.leases)), "waiting": float(waiting)}),
            *self.tell(
                "scheduler/gc",
                {"collected": float(run.tasks.counts[TaskState.COLLECTED]), "pending": float(run.clears.pending())},
            ),
        ]
