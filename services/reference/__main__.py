"""Entry point: `python -m services.reference --run DIR --instance N`, for other models than the reference `--model
NAME`."""

from __future__ import annotations

import os
import sys

from services.reference.service import ReferenceService, RewardModelService, TeacherService
from shared.actor.process import run_process
from shared.topology.models import REFERENCE, REWARD_MODEL, TEACHER

if __name__ == "__main__":
    services = {REFERENCE: ReferenceService, TEACHER: TeacherService, REWARD_MODEL: RewardModelService}
    status = run_process(services, "reference")
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit would hang or abort: a collective that waits for a dead rank blocks its thread, and gloo's threads abort
    # at teardown.
    os._exit(status)
