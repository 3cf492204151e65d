"""The keys of the rollout stage that every run has."""

from __future__ import annotations

from shared.stages import ROLLOUT, ROUTES

SAMPLED = tuple(name for name in ROLLOUT.makes if name not in ("turn_rewards", "read_ids", "read_lengths", ROUTES))
"""All keys of the stage but those that exist only with advantages per token, with a reward model, or with routes that
are replayed."""
