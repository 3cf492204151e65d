"""Entry point: `python -m services.rollout --run DIR --instance N`."""

from __future__ import annotations

import sys

from services.rollout.service import RolloutService
from shared.actor.process import run_process

if __name__ == "__main__":
    sys.exit(run_process(RolloutService, "rollout"))
