"""Entry point: `python -m services.reference --run DIR --instance N`, for the teacher `--model teacher`."""

from __future__ import annotations

import os
import sys

from services.reference.service import ReferenceService, TeacherService
from shared.actor.process import run_process
from shared.topology.models import REFERENCE, TEACHER

if __name__ == "__main__":
    status = run_process({REFERENCE: ReferenceService, TEACHER: TeacherService}, "reference")
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit would hang or abort: a collective that waits for a dead rank blocks its thread, and gloo's threads abort
    # at teardown.
    os._exit(status)
