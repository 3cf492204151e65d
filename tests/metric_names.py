"""Provides the names that docs/metrics.md lists, for tests that compare them with rows of metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def documented() -> list[re.Pattern[str]]:
    """Return the names in the table. Each is a pattern in which `<…>` matches any text."""
    names = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    return [pattern_of(name) for name in names]


def pattern_of(name: str) -> re.Pattern[str]:
    """Return the pattern of a documented name, in which `<…>` stands for any text."""
    return re.compile(".+".join(map(re.escape, re.split(r"<\w+>", name))))


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the items from `names` that no line in the table covers."""
    known = documented()
    return {name for name in names if not any(each.fullmatch(name) for each in known)}
