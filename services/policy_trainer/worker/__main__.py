"""Starts a worker: `python -m services.policy_trainer.worker --run D --instance i`."""

import os
import sys

from services.policy_trainer.worker.service import PolicyTrainerWorker
from shared.actor.process import run_process

status = run_process(PolicyTrainerWorker, "policy_trainer.worker")
sys.stdout.flush()
sys.stderr.flush()
# sys.exit would hang or abort: a collective that waits for a dead rank blocks its thread, and gloo's threads abort at
# teardown.
os._exit(status)
