"""The keys of the rollout stage that every run has."""

from __future__ import annotations

from shared.stages import ROLLOUT

SAMPLED = tuple(name for name in ROLLOUT.makes if name != "turn_rewards")
"""All keys of the stage but the one that exists only with advantages per token."""
