"""The last value of everything that services say, in one sequence of changes. Pure: no socket, no clock.

It must never grow without bound, nor past what one snapshot can carry: what would is refused and counted.
"""

from __future__ import annotations

from proto.messages import Snapshot, Telemetry, TopicRow, Update

MAX_TOPICS = 20_000
MAX_BYTES = 6 << 20
"""Of all rows as they travel: a snapshot is one message, and ends at 8 MiB."""
MAX_ROW_BYTES = 16 << 10
"""Of one row as it travels: subscribers' queues are bounded in updates, and so in bytes."""
MAX_SENDERS = 4_096
MAX_DROPPED = 2**48
"""What one sender may claim to have dropped; the sum over all of them still fits a message."""
ROW_BYTES, VALUE_BYTES = 48, 14
"""What a row and a value take besides their text, at most."""
TopicKey = tuple[str, int, str]


class MonitorState:
    """Takes changes, gives updates to send on and snapshots to begin with."""

    def __init__(self) -> None:
        self.sequence = 0
        """Of the newest update; 0 before the first."""
        self.refused = 0
        """Messages that were one topic too many, or too large."""
        self._rows: dict[TopicKey, TopicRow] = {}
        self._bytes = 0
        self._dropped: dict[int, int] = {}
        self._dropped_before = 0

    def take(self, message: Telemetry) -> Update | None:
        """One telemetry message; None when it was refused."""
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
        """A new last value of one topic; None when it was refused."""
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
        """Like `put`, but the same values as before are no change."""
        known = self._rows.get((row.service, row.instance, row.topic))
        return None if known is not None and known.values == row.values else self.put(row)

    @property
    def dropped(self) -> int:
        """Messages that senders could not hand over, in all their lives."""
        return self._dropped_before + sum(self._dropped.values())

    def snapshot(self) -> Snapshot:
        """Everything known, after `sequence` updates."""
        return Snapshot(sequence=self.sequence, rows=list(self._rows.values()), dropped=self.dropped)

    def _count_drops(self, incarnation: int, dropped: int) -> None:
        # a sender counts over its own life, and may come in out of order after a reconnect
        self._dropped[incarnation] = max(min(dropped, MAX_DROPPED), self._dropped.pop(incarnation, 0))
        while len(self._dropped) > MAX_SENDERS:
            before = self._dropped_before + self._dropped.pop(next(iter(self._dropped)))
            self._dropped_before = min(before, MAX_DROPPED)


def row_bytes(row: TopicRow) -> int:
    """What a row takes in a snapshot, at most."""
    text = len(row.service.encode()) + len(row.topic.encode())
    for key, value in row.values.items():
        text += VALUE_BYTES + len(key.encode()) + (len(value.encode()) if isinstance(value, str) else 0)
    return ROW_BYTES + text
