"""The last value of everything that services say, in one sequence of changes. Pure: no socket, no clock.

It must never grow without bound: topics beyond `MAX_TOPICS` are refused and counted.
"""

from __future__ import annotations

from proto.messages import Snapshot, Telemetry, TopicRow, Update

MAX_TOPICS = 20_000
MAX_SENDERS = 4_096
TopicKey = tuple[str, int, str]


class MonitorState:
    """Takes changes, gives updates to send on and snapshots to begin with."""

    def __init__(self) -> None:
        self.sequence = 0
        """Of the newest update; 0 before the first."""
        self.refused = 0
        """Messages about new topics when there were `MAX_TOPICS` already."""
        self._rows: dict[TopicKey, TopicRow] = {}
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
        if key not in self._rows and len(self._rows) >= MAX_TOPICS:
            self.refused += 1
            return None
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
        self._dropped[incarnation] = max(dropped, self._dropped.pop(incarnation, 0))
        while len(self._dropped) > MAX_SENDERS:
            self._dropped_before += self._dropped.pop(next(iter(self._dropped)))
