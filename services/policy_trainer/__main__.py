"""Starts the driver, or a server if the topology has a section `serve`: `python -m services.policy_trainer --run D`."""

import sys

from services.policy_trainer.service import PolicyTrainerService
from shared import topology as topologies
from shared.actor.process import run_process
from shared.actor.service import Service
from shared.rundir import RunDir


def service_of(run: RunDir) -> type[Service]:
    """Return the service that the topology of a run asks for."""
    if topologies.load_resolved(run.topology).serve is None:
        return PolicyTrainerService
    from services.policy_trainer.tinker.service import TinkerService  # a driver starts without a web server

    return TinkerService


sys.exit(run_process(service_of, "policy_trainer"))
