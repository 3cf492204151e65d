"""Entry point: `python -m services.reference --run DIR --instance N`."""

from __future__ import annotations

import os
import sys

from services.reference.service import ReferenceService
from shared.actor.process import run_process

if __name__ == "__main__":
    status = run_process(ReferenceService, "reference")
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit would hang or abort: a collective that waits for a dead rank blocks its thread, and gloo's threads abort
    # at teardown.
    os._exit(status)
