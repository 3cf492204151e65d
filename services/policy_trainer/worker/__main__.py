"""Starts a worker: `python -m services.policy_trainer.worker --run D --instance i`."""

import sys

from services.policy_trainer.worker.service import PolicyTrainerWorker
from shared.actor.process import run_process

sys.exit(run_process(PolicyTrainerWorker, "policy_trainer.worker"))
