"""Messages for observing a run: status, telemetry and the monitor's stream."""

from __future__ import annotations

from proto.messages.common import Array
from proto.registry import Message, Record, Request, message


class ServiceRow(Record, frozen=True, array_like=True):
    """One registered service as the scheduler sees it."""

    service: str
    instance: int
    state: str  # the state in its last heartbeat
    pid: int
    host: str  # name of its host
    incarnation: int
    heartbeat_age_s: float  # seconds since its last heartbeat
    rss_bytes: int
    endpoint: str = ""  # the endpoint that it registered


class TroubleRow(Record, frozen=True, array_like=True):
    """A `Trouble` of one service."""

    service: str
    instance: int
    kind: str  # a `TroubleKind`
    text: str  # one line


@message(100)
class Status(Message, frozen=True, kw_only=True):
    """The status of the run."""

    run: str  # name of the run
    step: int  # newest committed step
    steps: int  # training steps of the run
    lineage: int  # lineage of the current weights
    version: int  # newest published policy version
    services: list[ServiceRow]  # the registered services
    tasks: dict[str, int]  # number of tasks in each state
    store_bytes: int  # number of bytes in all stores together
    store_limit_bytes: int  # sum of the limits of all stores
    store_shards: int  # number of shards in all stores together
    last_row: dict[str, float]  # the newest metrics row that was written
    troubles: list[TroubleRow] = []  # the troubles in the latest heartbeats of the services
    dropped: dict[str, int] = {}  # training tasks dropped so far, by `DropReason`
    lost: dict[str, int] = {}  # samples of training tasks lost so far, by `LossReason`
    last_drop: str = ""  # the training task that was dropped last, and the reason


@message(101, reply=Status)
class GetStatus(Request, frozen=True, kw_only=True):
    """Ask for the status of the run."""


@message(110)
class Telemetry(Message, frozen=True, kw_only=True):
    """The values of a topic have changed. The message may be dropped."""

    service: str
    instance: int
    incarnation: int
    sequence: int  # counts all messages that this process has tried to send
    dropped: int  # counts those of them that were dropped
    at: float  # time of the change, in seconds since 1970
    topic: str  # name of the topic
    values: dict[str, float | str]  # all values of the topic


class TopicRow(Record, frozen=True, array_like=True):
    """The last value of one topic of one service."""

    service: str
    instance: int
    topic: str  # name of the topic
    at: float  # time of the change, in seconds since 1970
    values: dict[str, float | str]  # all values of the topic


@message(111)
class Snapshot(Message, frozen=True, kw_only=True):
    """The current state of the monitor: the last values of all topics."""

    sequence: int  # sequence of the last update in the snapshot; the stream continues after that update
    rows: list[TopicRow]  # the last values of every topic
    dropped: int  # telemetry messages that services dropped, over all their incarnations
    stream: str = ""  # tcp endpoint of the updates; empty: they are available only on the monitor's host


@message(112, reply=Snapshot)
class GetSnapshot(Request, frozen=True, kw_only=True):
    """A subscriber asks for the current state. It subscribes first, so that no update is missed in between."""


@message(121)
class History(Message, frozen=True, kw_only=True):
    """The history that a new observer has missed. The steps of each curve are in ascending order, and long curves are
    thinned out."""

    newest: dict[str, float]  # the newest row of metrics.jsonl, without non-finite values
    steps: dict[str, Array]  # the steps of each metric's points, float64, by metric name
    values: dict[str, Array]  # the values of each metric's points, float64, by metric name
    spans: list[TopicRow]  # the newest rows of topic `span` from all services, oldest first


@message(122, reply=History)
class GetHistory(Request, frozen=True, kw_only=True):
    """An observer asks for the curves and the timeline of a run. Each curve has at most 4096 points."""


@message(113)
class Update(Message, frozen=True, kw_only=True):
    """A topic has changed."""

    sequence: int  # grows by 1 with each update of one incarnation of the monitor
    row: TopicRow  # the new values
