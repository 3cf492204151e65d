"""Bounds of the wire, checked before anything is allocated; a sender checks the same bounds as a receiver.

An oversize frame makes a ZeroMQ peer reconnect for ever, hence the check on the sending side (SPEC section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NDIM = 8
MAX_INLINE_BYTES = 64 * 1024
"""Largest numeric array inside a message body; larger ones are shards and never pass a control message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may hold. Sizes in bytes; `frames` counts raw frames, and bounds the number of tensors too."""

    body_bytes: int
    frames: int
    frame_bytes: int
    total_bytes: int
    tensor_bytes: int = 1 << 62
    """Largest single tensor; by default whatever fits the message."""

    def __post_init__(self) -> None:
        for name in ("body_bytes", "frames", "frame_bytes", "total_bytes", "tensor_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"limits.{name}: {getattr(self, name)} is negative; give a size >= 0")


CONTROL = Limits(body_bytes=8 << 20, frames=64, frame_bytes=64 << 10, total_bytes=8 << 20, tensor_bytes=64 << 10)
"""Every control socket: metadata, and tensors that are themselves metadata, 64 KiB at most (promise 6)."""

BULK = Limits(body_bytes=1 << 20, frames=1024, frame_bytes=1 << 20, total_bytes=1 << 30)
"""Data-plane streams between hosts: frames of at most 1 MiB."""
