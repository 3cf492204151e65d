"""`python -m tests.integration.tiny.critic`: a tiny critic."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("critic"), "critic"))
