"""`python -m tests.integration.tiny.policy_trainer`: a tiny policy-trainer."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("policy-trainer"), "policy-trainer"))
