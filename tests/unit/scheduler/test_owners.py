"""Checks that only the three owners of the scheduler's state change their own fields."""

from __future__ import annotations

import ast
from pathlib import Path

import services.scheduler

OWNERS = {"shards": "shards.py", "history": "history.py", "ledger": "ledger.py"}


def test_only_an_owner_changes_its_fields() -> None:
    changes: list[str] = []
    for path in Path(services.scheduler.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner in OWNERS and OWNERS[owner] != path.name:
                changes.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not changes
