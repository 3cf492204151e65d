"""Progress callbacks for long operations."""

from __future__ import annotations

from collections.abc import Callable

Moved = Callable[[], None]


def nobody() -> None:
    """A `Moved` that ignores the progress."""
