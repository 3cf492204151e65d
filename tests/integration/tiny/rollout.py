"""`python -m tests.integration.tiny.rollout`: a tiny rollout."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("rollout"), "rollout"))
