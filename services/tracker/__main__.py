"""Starts a tracker: `python -m services.tracker --run DIR --instance N`."""

import os
import sys

from services.tracker.server import TrackerService
from shared.actor.process import run_process

if __name__ == "__main__":
    status = run_process(TrackerService, "tracker")
    sys.stderr.flush()
    os._exit(status)  # a tracker library waits at exit, and its threads can hang
