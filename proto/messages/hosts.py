"""Messages between the supervisor of a run and the agents on the run's other hosts (`python -m launch.host`)."""

from __future__ import annotations

from proto.messages.common import Ack
from proto.messages.process import ProcessRow
from proto.registry import Message, Record, Request, message


class HostProcess(Record, frozen=True, array_like=True):
    """A process that a host must run."""

    service: str
    instance: int
    threads: int  # number of its CPU threads
    gpus: list[int]  # the GPUs that it sees, as positions in the agent's list of GPUs


class HostFacts(Record, frozen=True, array_like=True):
    """The facts that a host reports about itself before it takes part in a run."""

    name: str  # its host name
    code: str  # digest of the rlbus code that is installed there
    python: str  # version of Python
    torch: str  # version of torch, or an empty string if it is not installed
    gpus: int  # number of GPUs that the agent may use
    niceness: int  # niceness of the host's processes
    free_bytes: int  # free space on the disk of the working directory, where agents keep the folders of their hosts
    problems: list[str]  # requirements of the topology that the host does not meet, one line each
    clock_s: float = 0.0
    """Seconds by which its clock is ahead of home's, as far as the time that the messages took cannot explain the
    difference. Negative if it is behind."""


@message(5, reply=Ack)
class HostCheck(Request, frozen=True, kw_only=True):
    """An agent asks whether its host can take part in the run, before it joins or fetches anything.

    Errors:
        bad_request: it cannot; each line of the message names a reason and a remedy.
    """

    host: str  # name of the host in `placement.hosts`
    facts: HostFacts  # what the host has and lacks


@message(35)
class HostOrders(Message, frozen=True, kw_only=True):
    """The processes that the host must run. The agent starts missing processes and drains all others."""

    processes: list[HostProcess]  # the processes, each with the GPUs and threads that it may use
    ends: bool = False  # the run is ending: drain everything and exit


@message(36, reply=HostOrders)
class HostReport(Request, frozen=True, kw_only=True):
    """An agent reports its host and its processes, once a second. With its first report, an incarnation joins the run.

    Errors:
        bad_request: the run has no host of this name, or the host lacks GPUs.
        conflict: another agent of this host is alive.
        lost: this incarnation no longer counts, because the host was considered lost. Stop everything, then join again.
    """

    host: str  # name of the host in `placement.hosts`
    incarnation: int  # incarnation of the agent
    endpoint: str  # endpoint at which the agent answers messages that operators or the scheduler send to a supervisor
    gpus: int  # number of GPUs that the agent may use
    processes: list[ProcessRow]  # the processes that it started
    ended: bool = False  # all these processes have ended, and this is the last report of the agent
    failed: str = ""  # the reason why the processes of this host cannot continue, in one line; empty if they can


@message(37, reply=Ack)
class HostGone(Request, frozen=True, kw_only=True):
    """A host is lost with everything on it: the leases of its processes end, and its stores are permanently lost.

    Processes that have registered again since then are not affected.
    """

    host: str  # name of the host, for the log
    incarnations: list[int]  # incarnations of the host's processes
    cause: str  # the reason, in one line for the log
