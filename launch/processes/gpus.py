"""Assigns the GPUs of this machine to processes: colocated services share them, all others get their own.

Services that do not take turns never share a GPU, and no service gets a GPU that the machine
lacks.

A process numbers the GPUs that it sees from 0; the values assigned here are those of CUDA_VISIBLE_DEVICES. A rank of
the trainer or of the reference sees one GPU, and an engine sees all of its `services.rollout.gpus`. Thus no process can
use another process's GPU, whether by mistake or through a library that always opens the first GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.processes.plan import Key, Resources, listen_endpoint, threads_of
from shared.topology import Topology
from shared.topology.services import DEVICE_SERVICE


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
    if there are too few GPUs; call `wanted` first to learn how many are needed.
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


def wanted(topology: Topology) -> int:
    """Return the number of GPUs that the services on this machine need."""
    return max((first + share.total for share, first in _placed(topology) if share.host == topology.home), default=0)


def described(topology: Topology) -> str:
    """Return how many GPUs each service uses on this machine, such as `policy-trainer 8, reference 8 (the same),
    rollout 8`."""
    together = topology.placement.colocate
    shares = [share for share in _shares(topology) if share.host == topology.home]
    sharing = [share.name for share in shares if share.name in together]
    parts = [f"{share.name} {share.total}{' (the same)' if share.name in sharing[1:] else ''}" for share in shares]
    return ", ".join(parts)


def _placed(topology: Topology) -> list[tuple[_Share, int]]:
    """Return every share with the number of its first GPU on its host."""
    next_free: dict[str | None, int] = {}
    shared_from: dict[str | None, int] = {}
    placed: list[tuple[_Share, int]] = []
    for share in _shares(topology):
        first = next_free.get(share.host, 0)
        if share.name in topology.placement.colocate:
            first = shared_from.setdefault(share.host, first)
        next_free[share.host] = max(next_free.get(share.host, 0), first + share.total)
        placed.append((share, first))
    return placed


def _shares(topology: Topology) -> list[_Share]:
    """Return the services that use GPUs, by host.

    Colocated services use the same number of GPUs (`service_checks`).
    """
    shares: dict[tuple[str, str | None], _Share] = {}
    for name, section in topology.services.placed.items():
        gpus = section.gpus if name == "rollout" else min(section.gpus, 1)
        for spec in topology.services_plan() if gpus else ():
            if spec.service == DEVICE_SERVICE[name]:
                share = shares.setdefault((name, spec.host), _Share(name, spec.host, [], gpus))
                share.instances.append(spec.instance)
    return list(shares.values())
