"""A reward function that delays a run until a file exists, and then gives the same rewards as the quickstart's."""

from __future__ import annotations

import time
from pathlib import Path

from services.rollout.rewards.builtin import exact_match
from shared.sample import Sample

POLL_S = 0.05


def reward(sample: Sample, *, until: str) -> float:
    while not Path(until).exists():
        time.sleep(POLL_S)
    return exact_match(sample)
