"""Limits on the text that a rollout puts into the store for the recorder."""

from __future__ import annotations

TOKEN_BYTES = 16
SAMPLE_BYTES = 1024
"""A recorded task has room for `TOKEN_BYTES` bytes per token and `SAMPLE_BYTES` bytes per sample."""


def text_limit_bytes(tokens: int, samples: int) -> int:
    """Return the maximum size, in bytes, of a task's shard, given the task's number of tokens (including prompts) and
    of samples."""
    return TOKEN_BYTES * tokens + SAMPLE_BYTES * samples
