"""Defines the events that the supervisor's state machine handles, and the effects that it returns.

`Event` and `Effect` are unions of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launch.processes.plan import Key
from shared.actor.service import ProcessState


class RunOutcome(StrEnum):
    """The outcomes of a run."""

    DONE = "DONE"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Spawned:
    """The process requested by `Spawn` runs as `pid`."""

    key: Key
    pid: int


@dataclass(frozen=True)
class SpareSettled:
    """The first spare process of `services` can be forked, or there is none."""

    services: Collection[str]


@dataclass(frozen=True)
class Reported:
    """A service reported its state. Ignored unless `pid` is that of the current process."""

    key: Key
    pid: int
    incarnation: int
    state: ProcessState
    cause: str = ""


@dataclass(frozen=True)
class Exited:
    """A process has exited. `status` is its exit status, or minus the number of the signal that ended it.

    `run_complete` is true if the driver had nothing left to do when it exited with 0.
    """

    key: Key
    pid: int
    status: int
    run_complete: bool = True


@dataclass(frozen=True)
class RestartAsked:
    """The operator wants these processes to be stopped and started again."""

    keys: Sequence[Key]


@dataclass(frozen=True)
class RollingRestartAsked:
    """The operator wants these groups of processes to be restarted one after the other. Each must be READY before the
    next is restarted."""

    groups: Sequence[Sequence[Key]]


@dataclass(frozen=True)
class DrainAsked:
    """The operator wants these processes to finish their leases and exit. They are not restarted."""

    keys: Sequence[Key]


@dataclass(frozen=True)
class StartAsked:
    """The operator wants these processes, which may be new or DRAINED, to run."""

    keys: Sequence[Key]


@dataclass(frozen=True)
class KillOrdered:
    """This process hangs: it does not answer, or the scheduler says that others wait for it. It is killed, counts as
    failed and restarts."""

    key: Key
    pid: int
    cause: str


@dataclass(frozen=True)
class EndAsked:
    """End the run: at the operator's request or the first Ctrl-C, or as FAILED because the processes of another host
    cannot continue and another start would fail for the same reason. With `at_once`, for example at the second Ctrl-C,
    nothing is drained."""

    cause: str
    outcome: RunOutcome = RunOutcome.STOPPED
    at_once: bool = False


@dataclass(frozen=True)
class HostsEnded:
    """No process of the run is left on another host."""


@dataclass(frozen=True)
class TimePassed:
    """Time has passed, or the run begins."""


Event = (
    SpareSettled
    | Spawned
    | Reported
    | Exited
    | RestartAsked
    | RollingRestartAsked
    | DrainAsked
    | StartAsked
    | KillOrdered
    | EndAsked
    | HostsEnded
    | TimePassed
)


# -------------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True)
class Spawn:
    """Start this process. The answer is `Spawned`, or `Exited` with pid 0 if it cannot be started."""

    key: Key


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM, so that the process drains and exits."""

    key: Key
    pid: int


@dataclass(frozen=True)
class RetireProcess:
    """Ask the service to exit once it has finished its leases."""

    key: Key
    pid: int


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL. If the process hangs, it first writes the stacks of its threads to its log."""

    key: Key
    pid: int
    hung: bool = False


@dataclass(frozen=True)
class Died:
    """Notice for the user: a process died and will restart in `delay_s` seconds."""

    key: Key
    cause: str
    restarts: int
    delay_s: float


@dataclass(frozen=True)
class GivenUp:
    """Notice for the user: a process failed too often, and the run goes on without it."""

    key: Key
    cause: str


@dataclass(frozen=True)
class RunEnded:
    """Every process has exited. `key` is the process whose failure ended the run, if any.

    `explained` means that the process has reported an input that cannot be used, so its log says no more than `cause`.
    """

    outcome: RunOutcome
    cause: str
    key: Key | None = None
    explained: bool = False


Effect = Spawn | Terminate | RetireProcess | Kill | Died | GivenUp | RunEnded
