"""Which GPUs of this machine each process sees: colocated services the same ones, all others their own. Pure.

A process numbers what it sees from 0: what is handed out here is the value of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from launch.supervisor.plan import Key
from shared.topology import Topology
from shared.topology.services import DEVICE_SERVICE, Placed


def visible_gpus(topology: Topology, available: str | None = None) -> dict[Key, str]:
    """CUDA_VISIBLE_DEVICES by process, for processes that the topology gives GPUs.

    `available`: the launcher's own CUDA_VISIBLE_DEVICES, which these are a part of; None: all of the machine's.
    """
    services = topology.services
    places: list[tuple[str, Placed, int]] = [("policy-trainer", services.policy_trainer, 1)]
    if services.reference is not None:
        places.append(("reference", services.reference, services.reference.dp))
    places.append(("rollout", services.rollout, services.rollout.instances))
    names = available.split(",") if available else None
    next_free: dict[str | None, int] = {}
    shared_from: dict[str | None, int] = {}
    found: dict[Key, str] = {}
    for name, service, instances in places:
        if not service.gpus:
            continue
        each = service.gpus if name == "rollout" else service.gpus // instances
        first = next_free.get(service.host, 0)
        if name in topology.placement.colocate:
            first = shared_from.setdefault(service.host, first)
        next_free[service.host] = max(next_free.get(service.host, 0), first + each * instances)
        for instance in range(instances):
            begin = first + instance * each
            seen = range(begin, begin + each) if names is None else names[begin : begin + each]
            text = ",".join(map(str, seen))
            if name == "policy-trainer":  # a rank picks its own among all of the trainer's
                found |= {(DEVICE_SERVICE[name], rank): text for rank in range(service.world_size)}
            else:
                found[name, instance] = text
    return found
