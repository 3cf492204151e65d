"""A reward and a loss of a user's own that are wrong at one step each, for the runs of `test_bad_steps`."""

from __future__ import annotations

from typing import Any

TASKS = 8
"""A step: with `shuffle: false` step s takes the rows from (s - 1) * TASKS on."""
REWARD_STEP, LOSS_STEP = 2, 4


def reward(sample: Any) -> float:
    """A number, yet none that 32 bits hold, for the second task of step REWARD_STEP; else how many even tokens."""
    if sample.task_id == f"train/0/{TASKS * (REWARD_STEP - 1) + 1}":
        return 1e300
    return float(sum(token % 2 == 0 for token in sample.token_ids))


def loss(cur: Any, anchor: Any, tokens: Any) -> Any:
    """REINFORCE, without a number for what was sampled before step LOSS_STEP's update (staleness 0)."""
    found = -(cur - anchor).exp() * tokens.advantages
    return found * float("nan") if int(tokens.versions.max()) == LOSS_STEP - 1 else found
