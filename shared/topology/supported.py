"""Lists the options that the schema knows but this build does not act on yet. Other checks judge what makes sense.

An option that silently does nothing is worse than one that is refused. When a feature is added, its line is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.topology.problem import Path
from shared.topology.schema import Topology


@dataclass(frozen=True)
class Unsupported:
    """Refuses a value at `path` (`*` is any key) for which `refuses` holds. `what` may contain `{value}`."""

    path: str
    refuses: Callable[[Any], bool]
    what: str
    use: str


def _any_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _given(value: Any) -> bool:
    return value is not None


def _other_than(*values: object) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in values


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _more_items_than(limit: int) -> Callable[[Any], bool]:
    return lambda value: value is not None and len(value) > limit


UNSUPPORTED = (
    Unsupported("services.rollout.parallel.pp", _above(1), "pipeline parallelism {value}", "1"),
    Unsupported("services.rollout.parallel.cp", _above(1), "context parallelism {value}", "1"),
    Unsupported("services.*.host", _given, "placement on host {value}", "no host (this machine)"),
    Unsupported("services.monitor.wandb", _given, "reporting to Weights & Biases", "metrics.jsonl of the run"),
    Unsupported("services.monitor.port", _given, "a web page at port {value}", "python -m launch.monitor"),
    Unsupported("placement.engine", _any_of("ray"), "placement by ray", "local"),
    Unsupported("placement.hosts", _more_items_than(0), "several hosts", "no hosts (this machine)"),
)


def unsupported(topology: Topology) -> Iterator[tuple[Path, str]]:
    """Yield the path and the message of every option in `topology` on which this build would not act."""
    document = topology.document()
    for option in UNSUPPORTED:
        for path, value in _values(document, tuple(option.path.split("."))):
            if option.refuses(value):
                yield (
                    path,
                    f"not available in this version: {option.what.format(value=value)}, use {option.use}",
                )


def _values(node: Any, pattern: tuple[str, ...]) -> Iterator[tuple[Path, Any]]:
    if not pattern:
        yield (), node
    elif isinstance(node, dict):
        for key in node if pattern[0] == "*" else [pattern[0]]:
            if key in node:
                for path, value in _values(node[key], pattern[1:]):
                    yield (key, *path), value
