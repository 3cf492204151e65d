"""Lists the options that the schema knows but this build does not act on yet. Other checks decide what is valid.

An option that silently does nothing is worse than one that is refused. When a feature is added, its line is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shared.topology.problem import Found, Path
from shared.topology.schema import Topology


class Unsupported(NamedTuple):
    """An option at `path` (`*` is any key) for which this build supports only one value. `what` may contain
    `{value}`."""

    path: str
    supported: object
    what: str
    use: str


UNSUPPORTED = (
    Unsupported("services.rollout.parallel.pp", 1, "pipeline parallelism {value}", "1"),
    Unsupported("services.rollout.parallel.cp", 1, "context parallelism {value}", "1"),
)


def unsupported(topology: Topology) -> Found:
    """Yield the path and the message of every option in `topology` that this build would not act on."""
    document = topology.document()
    for option in UNSUPPORTED:
        for path, value in _values(document, tuple(option.path.split("."))):
            if value != option.supported:
                yield path, f"not available in this version: {option.what.format(value=value)}; use {option.use}"


def _values(node: Any, pattern: tuple[str, ...]) -> Iterator[tuple[Path, Any]]:
    if not pattern:
        yield (), node
    elif isinstance(node, dict):
        for key in node if pattern[0] == "*" else [pattern[0]]:
            if key in node:
                for path, value in _values(node[key], pattern[1:]):
                    yield (key, *path), value
