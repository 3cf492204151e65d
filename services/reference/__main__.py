"""`python -m services.reference --run DIR --instance N`."""

from __future__ import annotations

import sys

from services.reference.service import ReferenceService
from shared.actor.process import run_process

if __name__ == "__main__":
    sys.exit(run_process(ReferenceService, "reference"))
