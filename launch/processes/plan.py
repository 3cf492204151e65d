"""Names the processes of a run: what each is given, the order in which they start and end, and how one has ended.

Services that do not take turns never share a GPU, and no service gets a GPU that the machine lacks. A process numbers
the GPUs that it sees from 0; the values assigned here are those of CUDA_VISIBLE_DEVICES. A rank of the trainer or of
a frozen model sees one GPU, and an engine sees all of its `services.rollout.gpus`. Thus no process can use another
process's GPU, whether by mistake or through a library that always opens the first GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proto.messages import ErrorCode
from shared.data.source import nearest
from shared.rpc.errors import RpcError
from shared.rundir import parse_service_name, service_name
from shared.topology import Topology
from shared.topology.models import DEVICE_SERVICE, FROZEN, POLICY, REFERENCE, WORKERS
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
    ("rollout", *FROZEN),
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
    *FROZEN,
    *WORKERS.values(),
    DRIVER,
    "batch-store",
    "scheduler",
)
"""Order of a rolling restart: services on which the fewest others depend are restarted first."""

EVERYTHING = "all"
"""Stands for every process of a run."""

LEASING = ("rollout", *FROZEN)
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


def command_of(service: str) -> list[str]:
    """Return what follows `python -m` to start a service, without the arguments that every service takes:
    `batch-store` -> `services.batch_store`."""
    for model, worker in WORKERS.items():
        if service == worker:
            return ["services.policy_trainer.worker", *(["--model", model] if model != POLICY else [])]
    if service in FROZEN:
        return ["services.reference", *(["--model", service] if service != REFERENCE else [])]
    return [f"services.{service.replace('-', '_')}"]


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


def describe_exit(status: int) -> str:
    """Format an exit status: `-9` -> `killed by SIGKILL`, `1` -> `exit status 1`."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"


@dataclass(frozen=True)
class _Share:
    """GPUs of a service on `host`, where it has `instances` with `each` GPUs per instance."""

    name: str
    host: str | None
    instances: list[int]
    per_instance: int

    @property
    def total(self) -> int:
        return len(self.instances) * self.per_instance


def gpu_names(visible: str | None, devices: Path = Path("/dev")) -> list[str]:
    """Return CUDA's names for the GPUs that this launcher may use. `visible` is its CUDA_VISIBLE_DEVICES, or None if
    unset.

    The list ends at the first name that CUDA would not know (`-1`, `NoDevFiles`), as it does in CUDA.
    """
    if visible is None:
        count = sum(1 for device in devices.glob("nvidia*") if device.name.removeprefix("nvidia").isdigit())
        return [str(index) for index in range(count)]
    names = [name.strip() for name in visible.split(",")]
    is_known = [name.isdigit() or name.startswith(("GPU-", "MIG-")) for name in names]
    return names[: is_known.index(False)] if False in is_known else names


def own_gpus() -> list[str]:
    """Return CUDA's names for the GPUs that this process may use."""
    return gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))


def resources_of(topology: Topology, names: Sequence[str]) -> dict[Key, Resources]:
    """Return what the topology gives to each process, if `names` are this machine's GPUs. See `visible_gpus`."""
    gpus = visible_gpus(topology, names)
    return {
        key: Resources(threads_of(topology, key[0]), seen, listen_endpoint(topology.transport, key[0]))
        for key, seen in gpus.items()
    }


def visible_gpus(topology: Topology, names: Sequence[str] | None = None) -> dict[Key, str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each process. The value is empty for processes to which the topology
    gives no GPU: they compute on the CPU, whatever the machine has.

    `names` are this machine's GPUs in order. With None, and on other hosts, GPUs are numbered from 0. Raises ValueError
    if there are too few GPUs; call `gpus_wanted` first to learn how many are needed.
    """
    seen = {(spec.service, spec.instance): "" for spec in topology.services_plan()}
    for share, first in _placed(topology):
        own = names if share.host == topology.home else None
        if own is not None and first + share.total > len(own):
            raise ValueError(f"{share.name}: GPUs {first} to {first + share.total - 1} of {len(own)}")
        for place, instance in enumerate(share.instances):
            mine = range(first + place * share.per_instance, first + (place + 1) * share.per_instance)
            seen[DEVICE_SERVICE[share.name], instance] = ",".join(str(i) if own is None else own[i] for i in mine)
    return seen


def gpus_wanted(topology: Topology) -> int:
    """Return the number of GPUs that the services on this machine need."""
    return max((first + share.total for share, first in _placed(topology) if share.host == topology.home), default=0)


def gpus_described(topology: Topology) -> str:
    """Return how many GPUs each service uses on this machine, such as `policy-trainer 8, reference 8 (the same),
    rollout 8`."""
    together = topology.placement.colocate
    shares = [share for share, _ in _placed(topology) if share.host == topology.home]
    sharing = [share.name for share in shares if share.name in together]
    parts = [f"{share.name} {share.total}{' (the same)' if share.name in sharing[1:] else ''}" for share in shares]
    return ", ".join(parts)


def _placed(topology: Topology) -> list[tuple[_Share, int]]:
    """Return the services that use GPUs, by host, each with the number of its first GPU there.

    Colocated services use the same number of GPUs (`service_checks`).
    """
    shares: dict[tuple[str, str | None], _Share] = {}
    for name, section in topology.services.placed.items():
        gpus = section.gpus if name == "rollout" else min(section.gpus, 1)
        for spec in topology.services_plan() if gpus else ():
            if spec.service == DEVICE_SERVICE[name]:
                share = shares.setdefault((name, spec.host), _Share(name, spec.host, [], gpus))
                share.instances.append(spec.instance)
    next_free: dict[str | None, int] = {}
    shared_from: dict[str | None, int] = {}
    placed: list[tuple[_Share, int]] = []
    for share in shares.values():
        first = next_free.get(share.host, 0)
        if share.name in topology.placement.colocate:
            first = shared_from.setdefault(share.host, first)
        next_free[share.host] = max(next_free.get(share.host, 0), first + share.total)
        placed.append((share, first))
    return placed
