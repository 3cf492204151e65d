"""Finds circles of imports, including imports inside functions and under TYPE_CHECKING."""

from __future__ import annotations

from collections.abc import Iterable

import grimp


def import_circles(packages: Iterable[str]) -> list[list[str]]:
    """Return the groups of modules of which each imports each other one, directly or through the rest of its group."""
    first, *others = packages
    graph = grimp.build_graph(first, *others, exclude_type_checking_imports=False, cache_dir=None)
    circles = {
        frozenset({module, *both})
        for module in graph.modules
        if (both := graph.find_upstream_modules(module) & graph.find_downstream_modules(module))
    }
    return sorted(sorted(circle) for circle in circles)


def problems(packages: Iterable[str]) -> list[str]:
    """Return a line for each circle."""
    return [
        f"import circle of {len(circle)} modules: {', '.join(circle)}; move what they share into a module of its own"
        for circle in import_circles(packages)
    ]
