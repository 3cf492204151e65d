"""How someone who is waited for says that something came, without being known to who waits."""

from __future__ import annotations

from collections.abc import Callable

Moved = Callable[[], None]


def nobody() -> None:
    """A `Moved` where nobody counts what comes."""
