"""Message limits. Receivers check them before they allocate memory, and senders before they send a message.

Senders check them because an oversize frame makes a ZeroMQ peer reconnect forever (SPEC section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NDIM = 8
MAX_INLINE_BYTES = 64 * 1024
"""Maximum size of a numeric array inside a message body, in bytes. Larger arrays are put as shards, outside control
messages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one message. Sizes are in bytes; `frames` limits raw frames as well as tensors."""

    body_bytes: int
    frames: int
    frame_bytes: int
    total_bytes: int
    tensor_bytes: int = 1 << 62
    """Maximum size of one tensor, in bytes. By default only the limits of the message apply."""


CONTROL = Limits(body_bytes=8 << 20, frames=64, frame_bytes=64 << 10, total_bytes=8 << 20, tensor_bytes=64 << 10)
"""Limits of control sockets, for metadata and tensors of at most 64 KiB (docs/architecture.md, promise 6)."""
