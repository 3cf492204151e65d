"""The life of processes, between services, operators and the supervisor."""

from __future__ import annotations

from typing import ClassVar

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


@message(10)
class ServiceReport(Request, frozen=True, kw_only=True):
    """A service tells its supervisor a change of state: STARTING, READY, DRAINING, STOPPED, FAILED."""

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int
    incarnation: int
    pid: int
    state: str
    cause: str = ""
    endpoint: str = ""


@message(11)
class RestartService(Request, frozen=True, kw_only=True):
    """Operator to supervisor: end and start again one instance (`instance` >= 0) or all of a service (-1)."""

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int = -1


@message(12)
class StopRun(Request, frozen=True, kw_only=True):
    """Operator to supervisor: drain everything and end the run."""

    REPLY: ClassVar[type[Message]] = Ack


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


@message(14)
class GetSupervisorState(Request, frozen=True, kw_only=True):
    """Operator to supervisor: which processes are there?"""

    REPLY: ClassVar[type[Message]] = SupervisorState


@message(15)
class KillInstance(Request, frozen=True, kw_only=True):
    """Scheduler to supervisor: SIGKILL this process, which hangs on devices that others wait for. Ack: it is dead.

    A process of that pid which is not there (any more) is dead; the instance starts again as after any death.
    """

    REPLY: ClassVar[type[Message]] = Ack
    service: str
    instance: int
    pid: int
    cause: str


@message(18)
class LogLines(Message, frozen=True, kw_only=True):
    """Answer to `GetLog`: whole lines in order, 256 KiB of them at most, and the `position` to go on from."""

    lines: list[str]
    position: int


@message(19)
class GetLog(Request, frozen=True, kw_only=True):
    """The last `lines` lines of a service's log; with a `position`, what came after that.

    Of operators to the supervisor, which asks the service itself when its log lies on a host that has joined.
    """

    REPLY: ClassVar[type[Message]] = LogLines
    service: str
    instance: int
    lines: int = 50
    position: int = -1
