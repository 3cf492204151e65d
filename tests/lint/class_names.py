"""Finds class names that the product defines more than once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def class_places(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return where each class is defined, as `file:line`."""
    places = defaultdict(list)
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return places


def problems(files: Iterable[Path]) -> list[str]:
    """Return a line for each name that has several classes."""
    return [
        f"class {name} is defined {len(places)} times: {', '.join(places)}; a class name exists once, so rename"
        for name, places in sorted(class_places(files).items())
        if len(places) > 1
    ]
