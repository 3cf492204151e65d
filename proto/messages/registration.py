"""Messages to the scheduler about services: registration, addresses, heartbeats and turns on devices."""

from __future__ import annotations

from enum import StrEnum

from proto.messages.tasks import WeightsRef
from proto.registry import Message, Record, Request, message


@message(20)
class Registered(Message, frozen=True, kw_only=True):
    """The service is registered."""

    scheduler_incarnation: int  # incarnation of the scheduler
    heartbeat_s: float  # interval, in seconds, at which the service must send heartbeats


@message(21, reply=Registered)
class Register(Request, frozen=True, kw_only=True):
    """A service announces its current incarnation. An earlier incarnation of the same instance loses its leases.

    Errors:
        bad_request: a number is out of range, a text is too long, or too many instances or stores are registered.
        lost: this incarnation was lost with its host (`HostGone`). The host's agent stops the process.
    """

    service: str
    instance: int
    incarnation: int
    pid: int
    host: str  # name of its host, for human readers
    endpoint: str  # endpoint of its mailbox; empty if it has none for other processes
    limit_bytes: int = 0
    """Memory limit of a batch store, plus its spill limit if it spills; 0 for other services."""
    data_id: str = ""
    """Identity of a batch store's data. A different value under the same store name means that the old data is
    lost."""
    host_id: str = ""
    """Processes with the same value can reach the service's ipc endpoint. All others need a tcp `endpoint`."""


class LeaseProgress(Record, frozen=True, array_like=True):
    """The progress of work on one lease."""

    lease_id: int
    progress: int
    """A counter that stops if the work itself hangs, but not while the work waits for a peer that may take a long
    time."""
    untouched: bool = False
    """The lease is waiting for its turn. If it ends in this state, that does not count as an attempt at its tasks."""


class TroubleKind(StrEnum):
    """The subject of a `Trouble`."""

    REWARDS = "rewards"  # reward functions are failing, until all samples of a lease are scored without a failure
    WORKFLOWS = "workflows"  # workflows are failing, until all samples of a lease succeed
    JUDGE = "judge"  # a judge or a teacher's server is not responding, so its work waits and nothing is leased
    OVERRIDDEN = "overridden"  # an agent asked for sampling settings that differ from the topology's
    TRACKER = "tracker"  # an experiment tracker is not accepting the run's steps, so they wait in metrics.jsonl


class Trouble(Record, frozen=True, array_like=True):
    """A condition of a service that a person should know about."""

    kind: str  # a `TroubleKind`
    text: str  # one line
    ends_run: bool = False  # the run does not wait for the trouble to end, so the driver gets no further batch


@message(22)
class HeartbeatAck(Message, frozen=True, kw_only=True):
    """The scheduler has seen the heartbeat."""

    scheduler_incarnation: int  # incarnation of the scheduler
    registered: bool  # false: register again
    lost_leases: list[int] = []  # leases that the service no longer holds; it stops working on them
    weights: WeightsRef | None = None
    """The newest version, sent only to an engine that holds an older one. It may be loaded while sampling continues."""
    upstream: list[str] = []
    """For a store that is not on the trainer's host: the stores to try for weights before the trainer's store, nearest
    first."""


@message(23, reply=HeartbeatAck)
class Heartbeat(Request, frozen=True, kw_only=True):
    """The mailbox thread of a service reports that it is alive. Leases whose progress has advanced are renewed.

    Errors:
        bad_request: a number is out of range, a text is too long, or there are too many troubles.
    """

    service: str
    instance: int
    incarnation: int
    state: str  # STARTING, READY or DRAINING
    rss_bytes: int = 0
    holds_step: int = -1
    """Policy version that an engine has loaded, or -1 if there is none or the service is not an engine."""
    holds_lineage: int = 0  # lineage of that version
    leases: list[LeaseProgress] = []  # the leases on which it works
    store_bytes: int = 0  # number of bytes that a batch store holds; 0 for other services
    store_shards: int = 0  # number of shards that a batch store holds; 0 for other services
    progress: int = 0  # counter of the worker thread; each advance renews the hold on shared devices
    troubles: list[Trouble] = []  # all current troubles


@message(24)
class Resolved(Message, frozen=True, kw_only=True):
    """The last registration of the instance."""

    endpoint: str  # the endpoint that it registered
    host_id: str  # processes with the same value use the ipc endpoint of the instance instead
    incarnation: int


@message(25, reply=Resolved)
class Resolve(Request, frozen=True, kw_only=True):
    """Ask for the endpoint of an instance of a service.

    Errors:
        missing: no such instance has registered yet.
    """

    service: str
    instance: int


@message(26)
class DeviceOrder(Message, frozen=True, kw_only=True):
    """The parts that may be on the shared devices.

    Parts that are held but not named must leave the devices. The next `HoldDevices` confirms that they have left.
    """

    parts: list[str]  # the parts of this process that may be on the devices
    granted: bool = False  # all parts that the process wants are included and now count as in use


@message(27, reply=DeviceOrder)
class HoldDevices(Request, frozen=True, kw_only=True):
    """A colocated process reports its parts on the shared devices. The answer is sent when these parts must or may
    change.

    A process loads only parts that were granted to it.

    Errors:
        bad_request: the process shares no devices, or has no such part.
        conflict: a newer report of this incarnation has arrived, or the parts contradict each other.
        lost: this incarnation is not registered.
        not_ready: there is nothing to change, or a newer report has arrived in the meantime.
    """

    service: str
    instance: int
    incarnation: int
    number: int  # number of the report in this incarnation; only the newest counts
    holds: list[str] = []  # the parts that are on the devices
    using: list[str] = []  # the held parts that are in use; these are not taken away
    wants: list[str] = []  # the parts that it waits for, all at once; empty while it uses any part
