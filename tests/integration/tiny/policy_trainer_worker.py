"""`python -m tests.integration.tiny.policy_trainer_worker`: a tiny policy-trainer-worker."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("policy-trainer-worker"), "policy-trainer-worker"))
