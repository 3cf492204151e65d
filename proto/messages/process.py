"""Messages about the life of processes, between services, operators and the supervisor."""

from __future__ import annotations

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


@message(10, reply=Ack)
class ServiceReport(Request, frozen=True, kw_only=True):
    """Service to supervisor: its state has changed to STARTING, READY, DRAINING, STOPPED or FAILED."""

    service: str
    instance: int
    incarnation: int
    pid: int
    state: str
    cause: str = ""
    endpoint: str = ""


@message(11, reply=Ack)
class RestartService(Request, frozen=True, kw_only=True):
    """Operator to supervisor: stop and restart one instance (`instance` >= 0) or all instances of a service (-1)."""

    service: str
    instance: int = -1


@message(12, reply=Ack)
class StopRun(Request, frozen=True, kw_only=True):
    """Operator to supervisor: drain everything and end the run."""


class ProcessRow(Record, frozen=True, array_like=True):
    """One supervised process."""

    service: str
    instance: int
    state: str
    pid: int
    incarnation: int
    restarts: int
    cause: str = ""
    rss_bytes: int = 0


@message(13)
class SupervisorState(Message, frozen=True, kw_only=True):
    """Answer to `GetSupervisorState`."""

    run: str
    phase: str
    processes: list[ProcessRow]


@message(14, reply=SupervisorState)
class GetSupervisorState(Request, frozen=True, kw_only=True):
    """Operator to supervisor: list the processes."""


@message(15, reply=Ack)
class KillInstance(Request, frozen=True, kw_only=True):
    """Scheduler to supervisor: SIGKILL a process that hangs on devices for which others wait. Ack: it is dead.

    A process of that pid that no longer exists counts as dead. The instance restarts as after any death.
    """

    service: str
    instance: int
    pid: int
    cause: str


@message(18)
class LogLines(Message, frozen=True, kw_only=True):
    """Answer to `GetLog`: whole lines in order, at most 256 KiB, and the `position` at which to continue."""

    lines: list[str]
    position: int


@message(19, reply=LogLines)
class GetLog(Request, frozen=True, kw_only=True):
    """Get the last `lines` lines of a service's log or, with a `position`, the lines after it.

    Operators send it to the supervisor, which asks the service itself if its log is on a host that has joined.
    """

    service: str
    instance: int
    lines: int = 50
    position: int = -1
