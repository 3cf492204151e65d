"""Keeps the last value of every topic, and numbers all changes in one sequence, without sockets or a clock. The topics
`cluster/*` come from the scheduler's status.

The size of the state is limited to what one snapshot can carry. Rows that would exceed the bounds are refused and
counted.
"""

from __future__ import annotations

from proto.messages import Snapshot, Status, Telemetry, TopicRow, Update
from shared.rundir import service_name

SOURCE = "monitor"
MAX_TOPICS = 20_000
MAX_BYTES = 6 << 20
"""Maximum encoded size of all rows, in bytes. A snapshot is one message of at most 8 MiB."""
MAX_ROW_BYTES = 16 << 10
"""Maximum encoded size of one row, in bytes. This bounds the size of a subscriber's queue, whose own limit counts only
updates."""
MAX_SENDERS = 4_096
MAX_DROPPED = 2**48
"""Maximum number of dropped messages that one sender can report, so that the sum over all senders fits in a message."""
ROW_BYTES, VALUE_BYTES = 48, 14
"""Maximum encoded sizes of a row and of a value, without their text, in bytes."""
TopicKey = tuple[str, int, str]


class MonitorState:
    """Turns changes into updates to publish, and provides snapshots."""

    def __init__(self) -> None:
        self.sequence = 0
        """Sequence number of the newest update, 0 before the first."""
        self.refused = 0
        """Number of rows that were refused because of too many topics or too many bytes."""
        self._rows: dict[TopicKey, TopicRow] = {}
        self._bytes = 0
        self._dropped: dict[int, int] = {}
        self._dropped_before = 0

    def take(self, message: Telemetry) -> Update | None:
        """Store a telemetry message and return the update, or None if the message was refused."""
        self._count_drops(message.incarnation, message.dropped)
        row = TopicRow(
            service=message.service,
            instance=message.instance,
            topic=message.topic,
            at=message.at,
            values=message.values,
        )
        return self.put(row)

    def put(self, row: TopicRow) -> Update | None:
        """Store the new last value of a topic and return the update, or None if the row was refused."""
        key = (row.service, row.instance, row.topic)
        old = self._rows.get(key)
        nbytes = row_bytes(row)
        more = nbytes - (row_bytes(old) if old is not None else 0)
        one_too_many = old is None and len(self._rows) >= MAX_TOPICS
        if one_too_many or nbytes > MAX_ROW_BYTES or self._bytes + more > MAX_BYTES:
            self.refused += 1
            return None
        self._bytes += more
        self._rows[key] = row
        self.sequence += 1
        return Update(sequence=self.sequence, row=row)

    def put_changed(self, row: TopicRow) -> Update | None:
        """Store a row as `put` does, but also return None if the values are the same as before."""
        before = self._rows.get((row.service, row.instance, row.topic))
        return None if before is not None and before.values == row.values else self.put(row)

    @property
    def dropped(self) -> int:
        """Total number of messages that senders have dropped, over all incarnations of each sender."""
        return self._dropped_before + sum(self._dropped.values())

    def snapshot(self) -> Snapshot:
        """Return all rows as of the current `sequence`."""
        return Snapshot(sequence=self.sequence, rows=list(self._rows.values()), dropped=self.dropped)

    def _count_drops(self, incarnation: int, dropped: int) -> None:
        # A sender counts drops from its own start, and its messages may arrive out of order after a reconnect.
        self._dropped[incarnation] = max(min(dropped, MAX_DROPPED), self._dropped.pop(incarnation, 0))
        while len(self._dropped) > MAX_SENDERS:
            before = self._dropped_before + self._dropped.pop(next(iter(self._dropped)))
            self._dropped_before = min(before, MAX_DROPPED)


def row_bytes(row: TopicRow) -> int:
    """Return the maximum encoded size of a row in a snapshot, in bytes."""
    text = len(row.service.encode()) + len(row.topic.encode())
    for key, value in row.values.items():
        text += VALUE_BYTES + len(key.encode()) + (len(value.encode()) if isinstance(value, str) else 0)
    return ROW_BYTES + text


def rows_of(status: Status, at: float) -> list[TopicRow]:
    """Return `cluster/status`, `cluster/services`, `cluster/losses` and, if there are any metrics, `cluster/metrics`.

    `at` is in seconds since 1970. Ages are omitted because they change all the time. `cluster/losses` holds the numbers
    of `dropped/<reason>` tasks and `lost/<reason>` samples so far and, under `<service>/<kind>`, the text of each
    current trouble.
    """
    values: dict[str, float | str] = {
        "reachable": 1.0,
        "run": status.run,
        "step": status.step,
        "steps": status.steps,
        "lineage": status.lineage,
        "version": status.version,
        "store/bytes": status.store_bytes,
        "store/limit_bytes": status.store_limit_bytes,
        "store/shards": status.store_shards,
    }
    values |= {f"tasks/{state}": count for state, count in status.tasks.items()}
    services: dict[str, float | str] = {}
    for row in status.services:
        name = service_name(row.service, row.instance)
        services[f"{name}/state"] = row.state
        services[f"{name}/pid"] = row.pid
        services[f"{name}/rss_bytes"] = row.rss_bytes
    losses: dict[str, float | str] = {f"dropped/{reason}": count for reason, count in status.dropped.items()}
    losses |= {f"lost/{reason}": count for reason, count in status.lost.items()}
    losses |= {
        f"{service_name(trouble.service, trouble.instance)}/{trouble.kind}": trouble.text for trouble in status.troubles
    }
    rows = [_row("cluster/status", at, values), _row("cluster/services", at, services)]
    rows.append(_row("cluster/losses", at, losses))
    if status.last_row:
        rows.append(_row("cluster/metrics", at, {key: float(value) for key, value in status.last_row.items()}))
    return rows


def unreachable(at: float) -> TopicRow:
    """Return the `cluster/status` row for a scheduler that does not answer."""
    return _row("cluster/status", at, {"reachable": 0.0})


def _row(topic: str, at: float, values: dict[str, float | str]) -> TopicRow:
    return TopicRow(service=SOURCE, instance=0, topic=topic, at=at, values=values)
