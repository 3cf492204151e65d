"""Builds the dispatch to the trainer's ranks from a topology."""

from __future__ import annotations

from collections.abc import Callable

from services.policy_trainer.dispatch import WorkerDispatch
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.topology import Topology

WORKER = "policy-trainer-worker"


def group_dispatch(topology: Topology, client: Callable[[str, int], Client], driver: int) -> WorkerDispatch:
    """Return a dispatch to the worker group of `topology`. `client` returns the client of a service instance."""
    trainer = topology.services.policy_trainer
    layout = Layout(trainer.world_size, trainer.parallel.tp, trainer.parallel.pp, trainer.parallel.cp)
    return WorkerDispatch([client(WORKER, rank) for rank in range(layout.world_size)], layout, driver)
