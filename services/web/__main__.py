"""Starts the web service: `python -m services.web --run DIR`."""

import sys

from services.web.service import WebService
from shared.actor.process import run_process

sys.exit(run_process(WebService, "web"))
