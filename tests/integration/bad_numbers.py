"""Rewards, advantages and a loss of a user's own that fail at one step each, for the runs of `test_bad_steps`."""

from __future__ import annotations

from typing import Any

TASKS = 8
"""A step: with `shuffle: false` step s takes the rows from (s - 1) * TASKS on."""
ADVANTAGE_STEP, LOSS_STEP, EMPTY_STEP = 2, 4, 6


_MARK = 1000.0


def reward(sample: Any) -> float:
    """How many even tokens; a mark for the second task of step ADVANTAGE_STEP, nothing for all tasks of EMPTY_STEP."""
    if int(sample.task_id.rsplit("/", 1)[1]) // TASKS == EMPTY_STEP - 1:
        raise ValueError("no score for this step")
    marked = sample.task_id == f"train/0/{TASKS * (ADVANTAGE_STEP - 1) + 1}"
    return _MARK if marked else float(sum(token % 2 == 0 for token in sample.token_ids))


def advantage(rewards: Any, groups: Any, loss_tokens: Any) -> Any:
    """Rewards around 0, and no number for those with the mark."""
    found = rewards - rewards.mean()
    found[rewards == _MARK] = float("nan")
    return found


def loss(cur: Any, anchor: Any, tokens: Any) -> Any:
    """REINFORCE, without a number for what was sampled before step LOSS_STEP's update (staleness 0)."""
    found = -(cur - anchor).exp() * tokens.advantages
    return found * float("nan") if int(tokens.versions.max()) == LOSS_STEP - 1 else found
