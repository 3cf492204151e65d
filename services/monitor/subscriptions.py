"""Counts the topics to which each connection has subscribed, without sockets or a clock.

libzmq keeps every subscription in a tree that takes about 40 bytes per byte of the topic, and does not limit it. Only
closing a connection removes its subscriptions.
"""

from __future__ import annotations

MOST_TOPICS = 32
"""Maximum number of topics to which one connection may subscribe."""
TOPIC_BYTES = 256
"""Maximum length of a topic, in bytes."""
ALL_BYTES = 256 << 10
"""Maximum total length of the topics of all connections, in bytes."""


class Subscriptions:
    """The topics by connection. A connection is named by its descriptor."""

    def __init__(self, all_bytes: int = ALL_BYTES) -> None:
        self._all_bytes = all_bytes
        self._topics: dict[int, set[bytes]] = {}
        self._nbytes: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def add(self, connection: int, topic: bytes) -> tuple[int, str] | None:
        """Note a subscription. Return the connection that must be closed because of it, and why, or None.

        If all connections together have too many topics, it is the connection that has the most.
        """
        topics = self._topics.setdefault(connection, set())
        if topic not in topics:
            topics.add(topic)
            self._nbytes[connection] = self._nbytes.get(connection, 0) + len(topic)
        if len(topic) > TOPIC_BYTES:
            return connection, f"subscribed to a topic of {len(topic)} bytes; at most {TOPIC_BYTES} are allowed"
        if len(topics) > MOST_TOPICS:
            return connection, f"subscribed to more than {MOST_TOPICS} topics; subscribe to a common prefix"
        if sum(self._nbytes.values()) > self._all_bytes:
            largest = max(self._nbytes, key=self._nbytes.__getitem__)
            return largest, f"has the most topics, and all connections together exceed {self._all_bytes} bytes of them"
        return None

    def remove(self, connection: int, topic: bytes) -> None:
        """Note that a connection no longer subscribes to a topic."""
        topics = self._topics.get(connection, set())
        if topic in topics:
            topics.remove(topic)
            self._nbytes[connection] -= len(topic)

    def forget(self, connection: int) -> None:
        """Drop the topics of a connection that has ended."""
        self._topics.pop(connection, None)
        self._nbytes.pop(connection, None)
