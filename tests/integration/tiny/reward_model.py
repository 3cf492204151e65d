"""`python -m tests.integration.tiny.reward_model`: a tiny reward model."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("reward-model"), "reward_model"))
