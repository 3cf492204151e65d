"""Starts the scheduler: `python -m services.scheduler --run RUN_DIR`."""

from __future__ import annotations

import sys

from services.scheduler.server import SchedulerService
from shared.actor.process import run_process

if __name__ == "__main__":
    sys.exit(run_process(SchedulerService, "scheduler"))
