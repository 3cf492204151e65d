"""Limits on the text that a rollout puts into the store for the recorder."""

from __future__ import annotations

TOKEN_BYTES = 16
SAMPLE_BYTES = 1024
"""The text of a recorded task may take up `TOKEN_BYTES` bytes per token plus `SAMPLE_BYTES` bytes per sample."""


def text_limit_bytes(tokens: int, samples: int) -> int:
    """Return the maximum size, in bytes, of the shard of a task that has `tokens` tokens (including prompts) and
    `samples` samples."""
    return TOKEN_BYTES * tokens + SAMPLE_BYTES * samples
