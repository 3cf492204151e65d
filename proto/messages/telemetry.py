"""What people see of a run: status, telemetry, the stream of the monitor."""

from __future__ import annotations

from typing import ClassVar

from proto.registry import Message, Record, Request, message


class ServiceRow(Record, frozen=True, array_like=True):
    """One registered service as the scheduler sees it."""

    service: str
    instance: int
    state: str
    pid: int
    host: str
    incarnation: int
    heartbeat_age_s: float
    rss_bytes: int
    endpoint: str = ""


class TroubleRow(Record, frozen=True, array_like=True):
    """A `Trouble` of one service."""

    service: str
    instance: int
    kind: str
    text: str


@message(100)
class Status(Message, frozen=True, kw_only=True):
    """Answer to `GetStatus`."""

    run: str
    step: int
    steps: int
    lineage: int
    version: int
    services: list[ServiceRow]
    tasks: dict[str, int]
    store_bytes: int
    store_limit_bytes: int
    store_shards: int
    last_row: dict[str, float]
    """Newest metrics row that was written."""
    troubles: list[TroubleRow] = []
    """What the services' last heartbeats told of."""
    dropped: dict[str, int] = {}
    """Training tasks dropped so far, by `DropReason`."""
    lost: dict[str, int] = {}
    """Samples of training tasks lost so far, by `LossReason`."""
    last_drop: str = ""
    """Which training task was dropped last, and why."""


@message(101)
class GetStatus(Request, frozen=True, kw_only=True):
    """Operator or monitor to scheduler."""

    REPLY: ClassVar[type[Message]] = Status


@message(110)
class Telemetry(Message, frozen=True, kw_only=True):
    """One way, may drop: `values` of `topic` changed. `sequence` counts every message tried, `dropped` those lost."""

    service: str
    instance: int
    incarnation: int
    sequence: int
    dropped: int
    at: float
    topic: str
    values: dict[str, float | str]


class TopicRow(Record, frozen=True, array_like=True):
    """Last value of one topic of one service."""

    service: str
    instance: int
    topic: str
    at: float
    values: dict[str, float | str]


@message(111)
class Snapshot(Message, frozen=True, kw_only=True):
    """Answer to `GetSnapshot`: everything the monitor knows; the stream goes on after `sequence`."""

    sequence: int
    rows: list[TopicRow]
    dropped: int
    stream: str = ""
    """Where the updates can be had over the network; empty: on the monitor's host only."""


@message(112)
class GetSnapshot(Request, frozen=True, kw_only=True):
    """A subscriber asks for the present state (after it has subscribed, so that nothing falls in between)."""

    REPLY: ClassVar[type[Message]] = Snapshot


@message(113)
class Update(Message, frozen=True, kw_only=True):
    """One way, from the monitor's PUB socket: the change with this `sequence`."""

    sequence: int
    row: TopicRow
