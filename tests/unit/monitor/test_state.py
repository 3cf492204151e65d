"""Tests the monitor's state without a socket: the latest values, a single sequence of updates, and bounded memory."""

from __future__ import annotations

import msgspec
import pytest

from proto import codec
from proto.envelope import FLAG_REPLY
from proto.messages import Telemetry, TopicRow
from services.monitor import state as module
from services.monitor.state import MonitorState


def telemetry(topic: str, value: float, *, incarnation: int = 1, dropped: int = 0, instance: int = 0) -> Telemetry:
    return Telemetry(
        service="rollout",
        instance=instance,
        incarnation=incarnation,
        sequence=1,
        dropped=dropped,
        at=1.0,
        topic=topic,
        values={"value": value},
    )


def test_snapshot_holds_the_latest_value_of_every_topic_of_every_instance() -> None:
    state = MonitorState()
    for message in (telemetry("a", 1), telemetry("a", 2), telemetry("b", 3), telemetry("a", 4, instance=1)):
        state.take(message)
    seen = {(row.instance, row.topic): row.values["value"] for row in state.snapshot().rows}
    assert seen == {(0, "a"): 2, (0, "b"): 3, (1, "a"): 4}


def test_updates_are_numbered_without_gaps_and_the_snapshot_has_the_number_of_the_last_update() -> None:
    state = MonitorState()
    updates = [state.take(telemetry("a", value)) for value in range(3)]
    assert [update.sequence for update in updates if update] == [1, 2, 3]
    assert state.snapshot().sequence == 3


def test_equal_values_cause_no_update() -> None:
    state = MonitorState()
    row = TopicRow("monitor", 0, "cluster/status", 1.0, {"step": 1.0})
    assert state.put_changed(row) is not None
    assert state.put_changed(TopicRow("monitor", 0, "cluster/status", 2.0, {"step": 1.0})) is None
    assert state.put_changed(TopicRow("monitor", 0, "cluster/status", 3.0, {"step": 2.0})) is not None


def test_drops_are_the_sum_of_the_senders_counts() -> None:
    state = MonitorState()
    state.take(telemetry("a", 1, incarnation=1, dropped=2))
    state.take(telemetry("a", 1, incarnation=1, dropped=5))
    state.take(telemetry("a", 1, incarnation=1, dropped=4))  # This message arrives late, after a newer one.
    state.take(telemetry("a", 1, incarnation=2, dropped=1))
    assert state.snapshot().dropped == 6


def test_drops_of_forgotten_senders_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SENDERS", 2)
    state = MonitorState()
    for incarnation in range(5):
        state.take(telemetry("a", 1, incarnation=incarnation, dropped=1))
    assert state.dropped == 5


def test_new_topics_beyond_the_limit_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOPICS", 1)
    state = MonitorState()
    assert state.take(telemetry("a", 1)) is not None
    assert state.take(telemetry("b", 1)) is None
    assert state.take(telemetry("a", 2)) is not None
    assert state.refused == 1
    assert len(state.snapshot().rows) == 1


def test_senders_cannot_make_a_snapshot_too_large_to_send() -> None:
    state = MonitorState()
    for sender in range(3 * module.MAX_SENDERS):
        state.take(telemetry("a", 1, incarnation=sender, dropped=2**64 - 1))
    state.take(telemetry("a", 1, dropped=-5))
    codec.encode(state.snapshot(), request_id=1, incarnation=1, flags=FLAG_REPLY)


@pytest.mark.parametrize("wide", [1, 1000, 8000])
def test_snapshot_can_be_sent_however_large_its_rows_are(wide: int) -> None:
    state = MonitorState()
    for number in range(3 * (8 << 20) // wide if wide > 1 else module.MAX_TOPICS + 9):
        state.take(msgspec.structs.replace(telemetry(f"t/{number}", 1), values={"text": "é" * wide, "n": 1.0}))
    assert state.refused > 0
    frames = codec.encode(state.snapshot(), request_id=1, incarnation=1, flags=FLAG_REPLY)
    assert sum(map(len, frames)) > 512 << 10, "and is not empty either"


def test_row_too_large_for_subscribers_queues_is_refused_and_the_old_row_is_kept() -> None:
    state = MonitorState()
    assert state.take(telemetry("a", 1)) is not None
    large = {"text": "x" * module.MAX_ROW_BYTES}
    assert state.take(msgspec.structs.replace(telemetry("a", 1), values=large)) is None
    assert state.refused == 1
    assert [row.values for row in state.snapshot().rows] == [telemetry("a", 1).values]


def test_row_that_shrinks_frees_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", module.MAX_ROW_BYTES)
    state = MonitorState()
    large = {"text": "x" * (module.MAX_BYTES - 1000)}
    assert state.take(msgspec.structs.replace(telemetry("a", 1), values=large)) is not None
    assert state.take(msgspec.structs.replace(telemetry("b", 1), values=large)) is None
    assert state.take(telemetry("a", 1)) is not None
    assert state.take(msgspec.structs.replace(telemetry("b", 1), values=large)) is not None
