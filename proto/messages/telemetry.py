"""Messages for people who observe a run: status, telemetry, the stream of the monitor."""

from __future__ import annotations

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
    """The newest metrics row that was written."""
    troubles: list[TroubleRow] = []
    """The troubles in the latest heartbeats of the services."""
    dropped: dict[str, int] = {}
    """Training tasks dropped so far, by `DropReason`."""
    lost: dict[str, int] = {}
    """Samples of training tasks lost so far, by `LossReason`."""
    last_drop: str = ""
    """The training task that was dropped last, and the reason."""


@message(101, reply=Status)
class GetStatus(Request, frozen=True, kw_only=True):
    """Operator or monitor to scheduler: get the status of the run."""


@message(110)
class Telemetry(Message, frozen=True, kw_only=True):
    """One way, may be dropped: `values` of `topic` changed. `sequence` counts all attempts, `dropped` the lost ones."""

    service: str
    instance: int
    incarnation: int
    sequence: int
    dropped: int
    at: float
    topic: str
    values: dict[str, float | str]


class TopicRow(Record, frozen=True, array_like=True):
    """The last value of one topic of one service."""

    service: str
    instance: int
    topic: str
    at: float
    values: dict[str, float | str]


@message(111)
class Snapshot(Message, frozen=True, kw_only=True):
    """Answer to `GetSnapshot`: all that the monitor knows. The stream continues after `sequence`."""

    sequence: int
    rows: list[TopicRow]
    dropped: int
    stream: str = ""
    """Network address of the updates. Empty: they are available on the monitor's host only."""


@message(112, reply=Snapshot)
class GetSnapshot(Request, frozen=True, kw_only=True):
    """A subscriber asks for the present state. It subscribes first, so that no update is missed in between."""


@message(113)
class Update(Message, frozen=True, kw_only=True):
    """One way, from the monitor's PUB socket: the change with this `sequence`."""

    sequence: int
    row: TopicRow
