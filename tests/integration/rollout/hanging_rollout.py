"""Runs the rollout service with an engine that hangs before decode step STEP.

`python -m tests.integration.rollout.hanging_rollout --run DIR`
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.service import RolloutService
from shared.actor.process import run_process

STEP = 3


def hang(engine: Any) -> None:
    if engine._steps == STEP:
        threading.Event().wait()
    _step(engine)


_step = TransformersEngine.step

if __name__ == "__main__":
    TransformersEngine.step = hang  # type: ignore[method-assign]
    sys.exit(run_process(RolloutService, "rollout"))
