"""Starts a worker: `python -m services.policy_trainer.worker --run D --instance i`, for the critic `--model critic`."""

import os
import sys

from services.policy_trainer.worker.service import CriticWorker, PolicyTrainerWorker
from shared.actor.process import run_process
from shared.topology.models import CRITIC, POLICY

status = run_process({POLICY: PolicyTrainerWorker, CRITIC: CriticWorker}, "policy_trainer.worker")
sys.stdout.flush()
sys.stderr.flush()
# sys.exit would hang or abort: a collective that waits for a dead rank blocks its thread, and gloo's threads abort at
# teardown.
os._exit(status)
