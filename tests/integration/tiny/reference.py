"""`python -m tests.integration.tiny.reference`: a tiny reference."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("reference"), "reference"))
