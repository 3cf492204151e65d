"""`python -m tests.integration.tiny.batch_store`: a tiny batch-store."""

import sys

from shared.actor.process import run_process
from tests.integration.tiny.service import service_class

sys.exit(run_process(service_class("batch-store"), "batch-store"))
