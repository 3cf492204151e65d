"""Starts the exporter: `python -m services.exporter --run DIR`."""

import sys

from services.exporter.server import ExporterService
from shared.actor.process import run_process

sys.exit(run_process(ExporterService, "exporter"))
