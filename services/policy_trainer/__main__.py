"""Starts the driver: `python -m services.policy_trainer --run D`."""

import sys

from services.policy_trainer.service import PolicyTrainerService
from shared.actor.process import run_process

sys.exit(run_process(PolicyTrainerService, "policy_trainer"))
