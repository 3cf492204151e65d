"""Messages to the scheduler about services: registration, addresses, heartbeats and turns on devices."""

from __future__ import annotations

from enum import StrEnum

from proto.messages.tasks import WeightsRef
from proto.registry import Message, Record, Request, message


@message(20)
class Registered(Message, frozen=True, kw_only=True):
    """Answer to `Register`."""

    scheduler_incarnation: int
    heartbeat_s: float


@message(21, reply=Registered)
class Register(Request, frozen=True, kw_only=True):
    """A service announces this life of itself. An earlier incarnation of the same instance loses its leases."""

    service: str
    instance: int
    incarnation: int
    pid: int
    host: str
    endpoint: str
    limit_bytes: int = 0
    """Memory limit of a batch store, plus its spill limit if it spills; 0 for other services."""
    data_id: str = ""
    """Identity of the data of a batch store. Another value under the same name means that the former data is lost."""
    host_id: str = ""
    """Processes with the same value reach the service's ipc endpoint. All others need a tcp `endpoint`."""


class LeaseProgress(Record, frozen=True, array_like=True):
    """The progress of the work on one lease. `progress` stops where the work itself hangs, but not while it waits for a
    peer that may take its time. `untouched`: it only waits for its turn. A lease that ends in this state does not count
    as an attempt of its tasks.
    """

    lease_id: int
    progress: int
    untouched: bool = False


class TroubleKind(StrEnum):
    """The subject of a `Trouble`."""

    REWARDS = "rewards"  # reward functions fail; lasts until all samples of a lease were scored without a failure
    WORKFLOWS = "workflows"  # as REWARDS, for workflows
    JUDGE = "judge"  # a judge does not answer: rewards wait, and nothing is leased
    OVERRIDDEN = "overridden"  # an agent asked for sampling settings that differ from the topology's


class Trouble(Record, frozen=True, array_like=True):
    """A condition of a service that a person should know. `kind` is a `TroubleKind`; `text` is one line.

    `ends_run`: waiting is over, and the scheduler gives the driver no further batch.
    """

    kind: str
    text: str
    ends_run: bool = False


@message(22)
class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Answer to `Heartbeat`. `registered` false: register again. `lost_leases`: stop working on them.

    `weights` is sent only to an engine with an older version than the newest. The engine may load it while it samples.
    """

    scheduler_incarnation: int
    registered: bool
    lost_leases: list[int] = []
    weights: WeightsRef | None = None


@message(23, reply=HeartbeatAck)
class Heartbeat(Request, frozen=True, kw_only=True):
    """A service is alive. Leases whose progress advanced are renewed. Sent by the mailbox thread."""

    service: str
    instance: int
    incarnation: int
    state: str
    rss_bytes: int = 0
    holds_step: int = -1
    """Policy version that an engine has loaded, or -1 if there is none or the service is no engine."""
    holds_lineage: int = 0
    leases: list[LeaseProgress] = []
    store_bytes: int = 0
    store_shards: int = 0
    progress: int = 0
    """Advanced only by the working thread. Renews the process's hold on shared devices."""
    troubles: list[Trouble] = []
    """All present troubles."""


@message(24)
class Resolved(Message, frozen=True, kw_only=True):
    """Answer to `Resolve`: the endpoint that the service registered."""

    endpoint: str
    host_id: str
    incarnation: int


@message(25, reply=Resolved)
class Resolve(Request, frozen=True, kw_only=True):
    """Ask for the endpoint of an instance of a service. Error(missing) while it is not registered."""

    service: str
    instance: int


@message(26)
class DeviceOrder(Message, frozen=True, kw_only=True):
    """Answer to `HoldDevices`: the parts that may be on the devices. `granted`: all `wants` are among them, now in use.

    Parts that are held and not named have to leave. The next `HoldDevices` confirms that they did.
    """

    parts: list[str]
    granted: bool = False


@message(27, reply=DeviceOrder)
class HoldDevices(Request, frozen=True, kw_only=True):
    """A colocated process reports its parts on the shared devices. Answered when these must or may change.

    `using` (of `holds`) are the parts in use, which are not taken away. `wants` are the parts it waits for, all at
    once, while using none. Only the newest `number` of a life counts. A process loads nothing that was not granted to
    it.
    """

    service: str
    instance: int
    incarnation: int
    number: int
    holds: list[str] = []
    using: list[str] = []
    wants: list[str] = []
