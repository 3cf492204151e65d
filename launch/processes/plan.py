"""Names the processes of a run: what each is given, the order in which they start and end, and how one has ended."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import parse_service_name, service_name
from shared.topology import Topology
from shared.topology.models import DEVICE_SERVICE, WORKERS
from shared.topology.services import Transport

Key = tuple[str, int]
"""(service, instance) of one process."""

DRIVER = "policy-trainer"
SUPERVISOR = "supervisor"

FIRST = ("scheduler", "batch-store", "monitor")
"""Services that all others talk to. They are READY before the others are started."""

LAST = (("batch-store",), ("monitor",), ("scheduler",))
"""Services that all others talk to. They end after the others, in this order."""

OPTIONAL = frozenset({"exporter", "recorder", "tracker", "web"})
"""If these services keep failing, the run goes on without them."""

DRAIN_ORDER = (
    (DRIVER,),
    ("rollout", "reference"),
    tuple(WORKERS.values()),
    ("exporter", "recorder", "web"),
    ("tracker",),
    *LAST,
)
"""All processes of a group have exited before the next group is told to stop. Services not named here belong to the
first group."""


ROLLING_ORDER = (
    "monitor",
    "recorder",
    "exporter",
    "web",
    "tracker",
    "rollout",
    "reference",
    *WORKERS.values(),
    DRIVER,
    "batch-store",
    "scheduler",
)
"""Order of a rolling restart: services on which the fewest others depend are restarted first."""

EVERYTHING = "all"
"""Stands for every process of a run."""

LEASING = ("rollout", "reference")
"""Services that lease tasks: they can be drained and can have any number of instances."""


OUTSIDE_KILLS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit statuses of processes that were killed from outside."""


@dataclass(frozen=True)
class Resources:
    """The resources that one process has on its host."""

    threads: int = 1
    """CPU threads."""
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES, or None for that of the launcher."""
    listen: str = ""
    """Endpoint at which the process answers other hosts, or an empty string."""


def processes_at_home(topology: Topology) -> list[Key]:
    """Return the processes that the topology places on this machine."""
    return [(spec.service, spec.instance) for spec in topology.services_plan() if spec.host == topology.home]


def module_of(service: str) -> str:
    """Return the module for `python -m`: `batch-store` -> `services.batch_store`."""
    if service in WORKERS.values():
        return "services.policy_trainer.worker"
    return f"services.{service.replace('-', '_')}"


def listen_endpoint(transport: Transport, service: str) -> str:
    """Return the endpoint at which a service answers other hosts, or an empty string.

    The services that are contacted first have known ports.
    """
    ports = {
        "scheduler": transport.scheduler_port,
        SUPERVISOR: transport.supervisor_port,
        "monitor": transport.monitor_port,
    }
    return f"tcp://{transport.listen}:{ports.get(service, 0)}" if transport.listen else ""


def threads_of(topology: Topology, service: str) -> int:
    """Return the number of CPU threads of each process of a service."""
    sections = {DEVICE_SERVICE[key]: section for key, section in topology.services.placed.items()}
    return (sections[service].threads or 1) if service in sections else 1


def drain_group(service: str) -> int:
    """Return the index in `DRAIN_ORDER` of the group with which a service ends."""
    for index, group in enumerate(DRAIN_ORDER):
        if service in group:
            return index
    return 0


def select(name: str, every: Iterable[Key]) -> list[Key]:
    """Return the processes that `NAME` or `NAME/INSTANCE` stands for, in order.

    Raises RpcError(bad_request) for an unknown name. If the service is unknown, the error names the nearest service, or
    all services if none is near. If the instance is unknown, the error names all instances of the service.
    """
    keys = sorted(set(every))
    service, instance = parse_service_name(name)
    if service not in {other for other, _ in keys}:
        raise RpcError(ErrorCode.BAD_REQUEST, f"no service {service!r}{nearest(service, {other for other, _ in keys})}")
    chosen = [key for key in keys if key[0] == service and instance in (-1, key[1])]
    if not chosen:
        there = ", ".join(service_name(*key) for key in keys if key[0] == service)
        raise RpcError(ErrorCode.BAD_REQUEST, f"no instance {service}/{instance}; available: {there}")
    return chosen


def rolling_order(keys: Iterable[Key], ranks: Mapping[str, int]) -> list[list[Key]]:
    """Return the groups of processes to restart one after another when everything is restarted.

    A group is one process, or the ranks of one model. `ranks` is the number of processes that together hold one
    model, by service; such processes end together anyway.
    """
    all_keys = list(keys)
    units: list[list[Key]] = []
    for service in dict.fromkeys([*ROLLING_ORDER, *(service for service, _ in all_keys)]):
        mine = [key for key in all_keys if key[0] == service]
        size = ranks.get(service, 1)
        units += [mine[at : at + size] for at in range(0, len(mine), size)]
    return units


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'rollout'?`, or a list of the known names."""
    names: Sequence[str] = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; available: {', '.join(names)}"


def describe_exit(status: int) -> str:
    """Format an exit status: `-9` -> `killed by SIGKILL`, `1` -> `exit status 1`."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"
