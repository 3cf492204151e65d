"""Messages about the life cycle of processes, exchanged by services, operators and the supervisor."""

from __future__ import annotations

from enum import StrEnum

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


@message(10, reply=Ack)
class ServiceReport(Request, frozen=True, kw_only=True):
    """A service reports that its state has changed."""

    service: str
    instance: int
    incarnation: int
    pid: int
    state: str  # STARTING, READY, DRAINING, STOPPED or FAILED
    cause: str = ""  # the reason for STOPPED or FAILED, in one line
    endpoint: str = ""  # endpoint of the mailbox


@message(11, reply=Ack)
class RestartService(Request, frozen=True, kw_only=True):
    """Stop and restart one instance of a service, or all of them.

    Service `all` stands for all processes of the run. Processes are restarted one after the other, except that the
    ranks of a model are restarted together. Each process is READY before the next one is stopped.

    Errors:
        bad_request: the run has no such service.
        draining: the run is ending.
    """

    service: str  # name of a service, or `all`
    instance: int = -1  # number of the instance; -1: all of them


@message(12, reply=Ack)
class StopRun(Request, frozen=True, kw_only=True):
    """Drain everything and end the run."""


class ProcessRow(Record, frozen=True, array_like=True):
    """One supervised process."""

    service: str
    instance: int
    state: str  # WAITING, BACKOFF, DRAINED, or the state that the service reported last
    pid: int
    incarnation: int
    restarts: int  # number of restarts so far
    cause: str = ""  # the reason why the process last ended, in one line
    rss_bytes: int = 0


class SpareRow(Record, frozen=True, array_like=True):
    """A spare process, which imports the libraries of `services`. The processes of these services are forked from it,
    except those that were started while it could not be forked."""

    services: list[str]  # names of services
    pid: int
    warm: bool  # whether it has finished its imports and can be forked
    rss_bytes: int = 0


class HostRow(Record, frozen=True, array_like=True):
    """One host of a run that has several."""

    host: str  # name of the host
    state: str  # HOME for the host on which the run was started; otherwise AWAITED, JOINED, LOST or ENDED
    state_s: float  # seconds since the host entered that state
    silent_s: float  # seconds since its agent last reported; 0 for HOME, -1 if no agent has reported
    processes: list[str]  # the processes that run or will run there, such as `rollout/0`
    cause: str = ""  # the last reason why the host was lost or could not join, in one line


@message(13)
class SupervisorState(Message, frozen=True, kw_only=True):
    """The processes of the run."""

    run: str  # name of the run
    phase: str  # STARTING, RUNNING, DRAINING or ENDED
    processes: list[ProcessRow]  # the processes that the supervisor started
    spares: list[SpareRow] = []  # the spare processes
    hosts: list[HostRow] = []  # the hosts of the run, HOME first; empty if there are no others


@message(14, reply=SupervisorState)
class GetSupervisorState(Request, frozen=True, kw_only=True):
    """List the processes of the run."""


@message(15, reply=Ack)
class KillInstance(Request, frozen=True, kw_only=True):
    """Send SIGKILL to a hung process that holds devices for which other processes are waiting. `Ack` means that the
    process is dead.

    The answer is the same if the process has already ended. The instance is restarted, as after any other death.

    Errors:
        missing: the supervisor did not start this process, so it can neither kill it nor tell whether it is alive.
    """

    service: str
    instance: int
    pid: int
    cause: str  # the reason, in one line for the log


class WaitKind(StrEnum):
    """The subject of a `WaitRow`."""

    CALL = "call"  # a request to another process has not been answered yet
    REFUSED = "refused"  # another process keeps answering that it has no room or is about to exit
    STEP = "step"  # the driver is waiting for tasks of its next step, or for an evaluation
    LEASE = "lease"  # a lease is making no progress
    CLEAR = "clear"  # a store has not acknowledged clears
    ROOM = "room"  # memory is (nearly) full
    CODE = "code"  # a user-code process is working on calls
    OUTAGE = "outage"  # a judge is not responding, so rewards are waiting and nothing is leased
    COMPUTE = "compute"  # a computation is running
    CHECKPOINT = "checkpoint"  # a checkpoint is being saved
    PROCESS = "process"  # a process is starting, stopping, or waiting for its restart
    STOPPED = "stopped"  # a process is stopped by a signal


class WaitRow(Record, frozen=True, array_like=True):
    """An event for which a process is waiting."""

    kind: str  # a `WaitKind`
    what: str  # one human-readable line
    since_s: float  # how long the wait has lasted, in seconds
    limit_s: float = 0.0  # seconds after which the wait ends or is acted on; 0: nothing limits the wait here
    of: str = ""  # the process (`rollout/0`) or service (`rollout`) that causes the wait; empty: none in the run


@message(16)
class Waits(Message, frozen=True, kw_only=True):
    """The current waits of a process."""

    incarnation: int
    state: str  # STARTING, READY, DRAINING, STOPPED or FAILED; for the supervisor, its phase (`SupervisorState`)
    state_s: float  # seconds since the process entered that state
    cause: str = ""  # what the process is waiting for in this state, in one line
    waits: list[WaitRow] = []  # in no particular order
    progress_s: float = -1.0
    """Seconds since the counter of its worker thread last advanced (`Heartbeat.progress`). -1: it has never
    advanced."""


@message(17, reply=Waits)
class GetWaits(Request, frozen=True, kw_only=True):
    """Ask a process what it is waiting for. Every process answers at once, even while it waits."""


@message(28, reply=Ack)
class DrainService(Request, frozen=True, kw_only=True):
    """Drain instances that lease tasks. They take no new leases, and exit once they have finished their current leases.

    The supervisor passes the request on to the service and does not start the instance again: its state is DRAINED.

    Errors:
        bad_request: the run has no such service, or the service does not lease tasks.
        draining: the run is ending.
    """

    service: str
    instance: int = -1  # number of the instance; -1: all of them


@message(29, reply=Ack)
class ScaleService(Request, frozen=True, kw_only=True):
    """Run instances 0 to `instances` - 1 of a service: start missing instances and drain those with higher numbers.

    The number is saved in the resolved topology of the run if the topology has a key for it.

    Errors:
        bad_request: the service cannot be scaled in this run, or this machine lacks the resources for the instances.
        draining: the run is ending.
    """

    service: str
    instances: int  # number of instances, 1 or more


class StoryRow(Record, frozen=True, array_like=True):
    """One event in the story of a task."""

    at: float  # time of the event, in seconds since 1970; 0 if it happened before the journal's first event
    service: str  # the process that the event concerns, such as `rollout/0`
    what: str  # the event
    facts: dict[str, str]  # values of the event by name


@message(6)
class Story(Message, frozen=True, kw_only=True):
    """The story of one task, oldest event first."""

    rows: list[StoryRow]  # the events; only the newest if there are very many


@message(7, reply=Story)
class GetStory(Request, frozen=True, kw_only=True):
    """Ask for the story of one task, from the journal and the logs on the host that holds the run directory.

    Errors:
        bad_request: the journal has no task of this name, or cannot be read.
        deadline: reading took too long.
    """

    task_id: str


@message(18)
class LogLines(Message, frozen=True, kw_only=True):
    """Lines of a log."""

    lines: list[str]  # whole lines in order
    position: int  # the position at which to continue


@message(19, reply=LogLines)
class GetLog(Request, frozen=True, kw_only=True):
    """Get the last lines of a service's log, or the lines from a given position onwards.

    Operators send this request to the supervisor. If the log is on a host that has joined, the supervisor asks the
    service itself.

    Errors:
        bad_request: this process has no log of that service.
    """

    service: str
    instance: int
    lines: int = 50  # number of lines from the end of the log
    position: int = -1  # 0 or more: get the lines from this position (see `LogLines`) and ignore `lines`
