"""Limits of the text that a rollout puts for the recorder."""

from __future__ import annotations

TOKEN_BYTES = 16
SAMPLE_BYTES = 1024
"""Room is reserved for `TOKEN_BYTES` for each token and `SAMPLE_BYTES` for each sample of a recorded task."""


def text_limit_bytes(tokens: int, samples: int) -> int:
    """Return the maximum bytes of the shard of a task with so many tokens, prompts included."""
    return TOKEN_BYTES * tokens + SAMPLE_BYTES * samples
