"""Tests which connection loses its place because of its subscriptions."""

from __future__ import annotations

from services.monitor.subscriptions import MOST_TOPICS, TOPIC_BYTES, Subscriptions


def test_a_connection_may_have_a_limited_number_of_topics_at_a_time() -> None:
    table = Subscriptions()
    for number in range(MOST_TOPICS):
        assert table.add(7, b"%d" % number) is None
        assert table.add(7, b"%d" % number) is None  # libzmq keeps it once
    ended = table.add(7, b"one more")
    assert ended is not None
    assert ended[0] == 7
    assert table.add(8, b"0") is None
    table.remove(7, b"one more")
    table.remove(7, b"0")
    table.remove(7, b"unknown")
    assert table.add(7, b"another") is None


def test_a_long_topic_ends_its_connection() -> None:
    table = Subscriptions()
    assert table.add(7, b"x" * TOPIC_BYTES) is None
    ended = table.add(7, b"x" * (TOPIC_BYTES + 1))
    assert ended is not None
    assert str(TOPIC_BYTES) in ended[1]


def test_the_connection_with_the_most_topics_ends_if_all_together_have_too_many() -> None:
    table = Subscriptions(all_bytes=100)
    for connection in range(9):
        assert table.add(connection, b"x" * 10) is None
    assert table.add(4, b"y" * 10) is None
    ended = table.add(8, b"z")
    assert ended is not None
    assert ended[0] == 4
    table.forget(4)
    assert table.add(8, b"w") is None
    assert len(table) == 10
