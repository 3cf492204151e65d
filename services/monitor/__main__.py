"""Starts the monitor: `python -m services.monitor --run DIR`."""

import sys

from services.monitor.server import MonitorService
from shared.actor.process import run_process

sys.exit(run_process(MonitorService, "monitor"))
