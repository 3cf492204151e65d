"""Adds up the token statistics of micro-batches, ranks and calls, without normalising them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

LARGEST = "_max"
"""Suffix of names whose values are combined by taking the maximum instead of the sum."""


def add_up(totals: dict[str, float], part: Mapping[str, SupportsFloat]) -> None:
    """Add `part`, which covers other tokens, to `totals`. Names that end in `_max` take the larger value."""
    for name, value in part.items():
        if name.endswith(LARGEST):
            totals[name] = max(totals.get(name, 0.0), float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
