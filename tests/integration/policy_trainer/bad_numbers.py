"""User-defined rewards, advantages and a loss that each fail at one step, for the runs of `test_bad_steps`."""

from __future__ import annotations

from typing import Any

TASKS = 8
"""Number of tasks per step. With `shuffle: false`, step s uses the rows from (s - 1) * TASKS on."""
ADVANTAGE_STEP, LOSS_STEP, EMPTY_STEP = 2, 4, 6


_MARK = 1000.0


def reward(sample: Any) -> float:
    """Return the number of even tokens, or a mark for the second task of ADVANTAGE_STEP; raise for every task of
    EMPTY_STEP.
    """
    if int(sample.task_id.rsplit("/", 1)[1]) // TASKS == EMPTY_STEP - 1:
        raise ValueError("no score for this step")
    marked = sample.task_id == f"train/0/{TASKS * (ADVANTAGE_STEP - 1) + 1}"
    return _MARK if marked else float(sum(token % 2 == 0 for token in sample.token_ids))


def advantage(rewards: Any, groups: Any, loss_tokens: Any) -> Any:
    """Return centred rewards, with NaN for marked rewards."""
    found = rewards - rewards.mean()
    found[rewards == _MARK] = float("nan")
    return found


def loss(cur: Any, anchor: Any, tokens: Any) -> Any:
    """Return the REINFORCE loss, or NaN if the newest token is from version LOSS_STEP - 1: with staleness 0, these
    are the samples of LOSS_STEP.
    """
    found = -(cur - anchor).exp() * tokens.advantages
    return found * float("nan") if int(tokens.versions.max()) == LOSS_STEP - 1 else found
