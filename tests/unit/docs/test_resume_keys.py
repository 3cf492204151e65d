"""The table in docs/stopping.md names exactly the keys that `--resume` does not allow to change."""

from __future__ import annotations

import re
from pathlib import Path

from launch.checks.resumed import FIXED, FIXED_BITS, PASSES

SECTION = (Path(__file__).resolve().parents[3] / "docs" / "stopping.md").read_text().split("## Keys that may change")[1]


def keys(row: str) -> set[str]:
    """Return the keys in a row of the table. The row of every run mentions the passes as exceptions."""
    cells = next(line for line in SECTION.splitlines() if line.startswith(row)).split("|")[2]
    return set(re.findall("`([^`]+)`", cells)) - PASSES


def test_the_table_names_the_keys_that_are_fixed_in_every_run() -> None:
    assert keys("| in every run") == set(FIXED)


def test_the_table_names_the_keys_that_are_fixed_in_deterministic_runs() -> None:
    assert keys("| also with") == set(FIXED_BITS)
