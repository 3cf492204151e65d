"""`ctl scale`: checks whether a run can have a different number of instances of a service, and returns the resources of
these instances. It starts nothing."""

from __future__ import annotations

import os

from launch.processes.gpus import described, own_gpus, resources_of, wanted
from launch.processes.plan import LEASING, Key, Resources, listen_endpoint, threads_of
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from shared.topology import Topology, TopologyError, load

THREADS_PER_CPU = 4
"""Maximum number of CPU threads of all instances together per CPU that this process may use."""


class Scaling:
    """Decides how many instances the services of one run can have."""

    def __init__(self, run: RunDir, topology: Topology) -> None:
        self._run = run
        self.ranks = topology.ranks

    def resize(self, service: str, instances: int) -> dict[Key, Resources]:
        """Return what each of the `instances` of a service is given, and write the number into the resolved topology.

        The topology has no key for the number of references on CPUs, so --resume does not start the additional ones.
        Raises a one-line RpcError(bad_request) and writes nothing if the run cannot have this number.
        """
        now = load(self._run.topology)
        _check(now, service, instances)
        threads, cpus = threads_of(now, service), len(os.sched_getaffinity(0))
        setting = _setting(now, service, instances)
        away = any(spec.service == service for spec in now.away_plan())
        if away and not setting:
            raise _refused(service, instances, "on the CPUs of other hosts, the number follows from the topology")
        if not away and instances * threads > THREADS_PER_CPU * cpus:
            most = THREADS_PER_CPU * cpus // threads
            text = f"{instances * threads} CPU threads on {cpus} CPUs exceed {THREADS_PER_CPU} per CPU"
            raise _refused(service, instances, f"{text}; use {most} or fewer")
        try:
            then = load(self._run.topology, [setting] if setting else [])
        except TopologyError as error:
            raise _refused(service, instances, "; ".join(str(error).splitlines())) from None
        names = own_gpus()
        if wanted(then) > len(names):
            text = f"{wanted(then)} GPUs wanted ({described(then)}), but there are {len(names)}"
            raise _refused(service, instances, text)
        before, after = resources_of(now, names), resources_of(then, names)
        here = {(spec.service, spec.instance) for spec in now.services_plan() if spec.host == now.home}
        moved = [key for key in before if key in after and after[key].gpus != before[key].gpus and key in here]
        if moved:
            text = f"the GPUs of {service_name(*moved[0])} would change"
            raise _refused(service, instances, f"{text}; stop the run and --resume it with --set {setting}")
        if setting:
            then.dump_resolved(self._run.topology)
        new = Resources(threads, "", listen_endpoint(then.transport, service))
        return {(service, instance): after.get((service, instance), new) for instance in range(instances)}


def _check(topology: Topology, service: str, instances: int) -> None:
    """Raise RpcError(bad_request) if the service cannot be scaled in this run, or cannot have this number of
    instances."""
    if service not in LEASING or (service == "reference" and topology.services.reference is None):
        text = f"{service} cannot be scaled: in this run only {', '.join(_scalable(topology))} can"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if topology.run.deterministic:
        raise _refused(service, instances, "run.deterministic fixes the plan; start a new run with that number")
    if service in topology.colocated_services:
        raise _refused(service, instances, "it takes turns on devices (placement.colocate), in a fixed plan")
    size = topology.ranks.get(service, 1)
    if instances < 1 or instances % size:
        raise _refused(
            service, instances, f"use a multiple of {size}, at least {size}" if size > 1 else "use 1 or more"
        )


def _scalable(topology: Topology) -> list[str]:
    return [name for name in LEASING if name != "reference" or topology.services.reference is not None]


def _setting(topology: Topology, service: str, instances: int) -> str:
    """Return the override that sets the number, or an empty string if the topology has no key for it."""
    if service == "rollout":
        return f"services.rollout.instances={instances}"
    reference = topology.services.reference
    return f"services.reference.gpus={instances}" if reference is not None and reference.gpus else ""


def _refused(service: str, instances: int, why: str) -> RpcError:
    return RpcError(ErrorCode.BAD_REQUEST, f"scale {service} to {instances} refused: {why}")
