"""Tests the versions of a rollout without an engine, which are the numbers that its leases name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from services.rollout.weights.numbers import NumberedVersions
from services.rollout.weights.sync import HeldVersion


def brought(versions: NumberedVersions, lineage: int, step: int, *, exact: bool = False) -> tuple[int, int]:
    lease: Any = SimpleNamespace(grant=SimpleNamespace(weights=SimpleNamespace(lineage=lineage, step=step)))

    async def work() -> tuple[int, int]:
        async with versions.bring(lease, exact=exact) as block:
            return block.lineage, block.first

    return asyncio.run(work())


def test_a_lease_has_the_newest_version_that_any_lease_has_named() -> None:
    versions = NumberedVersions()
    assert versions.holds == HeldVersion(0, -1)
    assert brought(versions, 0, 3) == (0, 3)
    assert brought(versions, 0, 2) == (0, 3)
    assert brought(versions, 1, 1) == (1, 1)  # a later lineage is newer, whatever its step
    assert versions.holds == HeldVersion(1, 1)


def test_a_lease_that_needs_one_version_has_it() -> None:
    versions = NumberedVersions()
    assert brought(versions, 0, 5) == (0, 5)
    assert brought(versions, 0, 4, exact=True) == (0, 4)
