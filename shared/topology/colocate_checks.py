"""Checks that the services of `placement.colocate` can take turns on the same devices, from the topology alone."""

from __future__ import annotations

from shared.topology.models import DEVICE_SERVICE
from shared.topology.problem import Found
from shared.topology.schema import Topology
from shared.topology.services import Placed

_COLOCATE = ("placement", "colocate")


def check(topology: Topology) -> Found:
    """Yield names that cannot take turns, hosts or numbers of GPUs that differ, and settings under which a rollout
    cannot take turns."""
    names = topology.placement.colocate
    if not names:
        return
    for index, name in enumerate(names):
        if name not in DEVICE_SERVICE:
            message = f"{name!r} is not a service with devices; use policy-trainer, reference or rollout"
            yield (*_COLOCATE, index), message
        elif name in names[:index]:
            yield (*_COLOCATE, index), f"{name} is named twice; remove one"
        elif name == "reference" and not topology.needs_reference:
            yield (*_COLOCATE, index), "no reference is started without algorithm.kl.coef above 0; leave it out"
    if len(names) == 1:
        yield _COLOCATE, f"{names[0]} alone shares nothing; name two services or leave it out"
    yield from _places(topology)
    if "rollout" in names:
        yield from _rollout(topology)


def _places(topology: Topology) -> Found:
    known = topology.services.placed
    placed = [(name, known[name]) for name in topology.placement.colocate if name in known]
    for name, service in placed[1:]:
        first, other = placed[0]
        here, there = _hosts(topology, service), _hosts(topology, other)
        if here != there or len(here) > 1:
            message = f"{' and '.join(here)}, but {first}, which is colocated, is on {' and '.join(there)}"
            yield ("services", name, "host"), f"{message}; use one host"
        mine, theirs = _devices(topology, name, service), _devices(topology, first, other)
        if mine != theirs:
            message = f"{name} uses {mine} GPUs, but {first}, which is colocated, uses {theirs}; use the same number"
            yield ("services", name, "gpus"), message


def _hosts(topology: Topology, service: Placed) -> list[str]:
    return sorted(set(service.host or (topology.home or "this machine",)))


def _devices(topology: Topology, name: str, service: Placed) -> int:
    return service.gpus * (topology.services.rollout.instances if name == "rollout" else 1)


def _rollout(topology: Topology) -> Found:
    rollout = topology.services.rollout
    if topology.staleness:
        message = f"{topology.staleness}: a colocated rollout cannot run ahead of the trainer; set 0"
        yield ("staleness",), message
    if rollout.in_flight != "wait":
        message = f"{rollout.in_flight}: a colocated engine sleeps while the trainer computes new weights; use wait"
        yield ("services", "rollout", "in_flight"), message
    if rollout.engine == "openai":
        message = "the engine's own server would keep its memory; colocate vllm or transformers"
        yield ("services", "rollout", "engine"), message
