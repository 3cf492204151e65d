"""Starts the recorder: `python -m services.recorder --run DIR`."""

import sys

from services.recorder.server import RecorderService
from shared.actor.process import run_process

sys.exit(run_process(RecorderService, "recorder"))
