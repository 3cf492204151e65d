"""Puts together what micro-batches, ranks and calls counted of their tokens. Never divides, knows no metric's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

LARGEST = "_max"
"""The ending of a name whose values are not added up: the largest counts."""


def add_up(totals: dict[str, float], part: Mapping[str, SupportsFloat]) -> None:
    """Add `part`, of other tokens, to `totals`; names that end in `_max` take the larger value."""
    for name, value in part.items():
        if name.endswith(LARGEST):
            totals[name] = max(totals.get(name, 0.0), float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
