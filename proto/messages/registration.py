"""Who is there, where, and how it goes: registration, heartbeats and turns on devices, at the scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from proto.messages.tasks import WeightsRef
from proto.registry import Message, Record, Request, message


@message(20)
class Registered(Message, frozen=True, kw_only=True):
    """Answer to `Register`."""

    scheduler_incarnation: int
    heartbeat_s: float


@message(21)
class Register(Request, frozen=True, kw_only=True):
    """A service announces this life of itself. An earlier incarnation of the same instance loses its leases."""

    REPLY: ClassVar[type[Message]] = Registered
    service: str
    instance: int
    incarnation: int
    pid: int
    host: str
    endpoint: str
    limit_bytes: int = 0
    """A batch store's memory limit (plus spill, when there is one); 0 for everyone else."""
    data_id: str = ""
    """A batch store's: names what it holds. Another one under the same name means that the former data is lost."""
    host_id: str = ""
    """Who has the same one reaches the service's ipc endpoint; everyone else needs a tcp `endpoint`."""


class LeaseProgress(Record, frozen=True, array_like=True):
    """How far the work on one lease is. `progress` stands still where that hangs, not while a peer that is waited for
    may take its time. `untouched`: it only waits for its turn, and if it ends so that counts as no attempt of its
    tasks.
    """

    lease_id: int
    progress: int
    untouched: bool = False


class TroubleKind(StrEnum):
    """What a `Trouble` is about."""

    REWARDS = "rewards"  # reward functions fail; lasts until a whole lease was scored without a failure
    WORKFLOWS = "workflows"  # the same of workflows
    JUDGE = "judge"  # a judge does not answer: rewards wait, nothing is leased
    OVERRIDDEN = "overridden"  # an agent asked for other sampling than the topology's


class Trouble(Record, frozen=True, array_like=True):
    """Something that a person should know of a service. `kind`: a `TroubleKind`; `text`: one line.

    `ends_run`: waiting is over, the scheduler gives the driver no further batch.
    """

    kind: str
    text: str
    ends_run: bool = False


@message(22)
class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Answer to `Heartbeat`. `registered` false: register again. `lost_leases`: stop working on them.

    `weights`: only to an engine that holds an older version than the newest one; it may update what it is sampling.
    """

    scheduler_incarnation: int
    registered: bool
    lost_leases: list[int] = []
    weights: WeightsRef | None = None


@message(23)
class Heartbeat(Request, frozen=True, kw_only=True):
    """A service is alive; leases whose progress advanced are renewed. Sent by the mailbox thread."""

    REPLY: ClassVar[type[Message]] = HeartbeatAck
    service: str
    instance: int
    incarnation: int
    state: str
    rss_bytes: int = 0
    holds_step: int = -1
    """Policy version an engine has loaded; -1: none, or not an engine."""
    holds_lineage: int = 0
    leases: list[LeaseProgress] = []
    store_bytes: int = 0
    store_shards: int = 0
    progress: int = 0
    """Advanced by the working thread only; renews what the process holds on shared devices."""
    troubles: list[Trouble] = []
    """All that there are now."""


@message(24)
class Resolved(Message, frozen=True, kw_only=True):
    """Answer to `Resolve`: what the service registered."""

    endpoint: str
    host_id: str
    incarnation: int


@message(25)
class Resolve(Request, frozen=True, kw_only=True):
    """Where does an instance of a service answer? Error(missing) while it is not registered."""

    REPLY: ClassVar[type[Message]] = Resolved
    service: str
    instance: int


@message(26)
class DeviceOrder(Message, frozen=True, kw_only=True):
    """Answer to `HoldDevices`: what may lie on the shared devices. `granted`: with all that was wanted, now in use.

    Parts that are held and not named have to leave; the next `HoldDevices` says that they did.
    """

    parts: list[str]
    granted: bool = False


@message(27)
class HoldDevices(Request, frozen=True, kw_only=True):
    """A colocated process says what of it lies on the shared devices. Answered when that has to change, or may.

    `using` (of `holds`): what it works with, not to be taken; `wants`: what it waits for, all at once, using nothing.
    Only the newest `number` of a life counts. A process loads nothing that was not granted to it.
    """

    REPLY: ClassVar[type[Message]] = DeviceOrder
    service: str
    instance: int
    incarnation: int
    number: int
    holds: list[str] = []
    using: list[str] = []
    wants: list[str] = []
