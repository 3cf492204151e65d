"""`load` turns a YAML file and `--set` overrides into a checked Topology, or reports all problems.

It does not start, create or download anything.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from shared.topology import derive
from shared.topology.checks import check
from shared.topology.document import Document, read
from shared.topology.explain import explain
from shared.topology.hub import HubName, model_name, source_name
from shared.topology.paths import absolute
from shared.topology.problem import Path, TopologyError
from shared.topology.schema import Topology

MODEL: Path = ("policy", "model")
_FILES: tuple[Path, ...] = (MODEL, ("data",))
"""Keys whose values name files."""


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
) -> Topology:
    """Load the topology in the YAML file `path` with the overrides `a.b=value` applied in order.

    Relative paths, including those in overrides, are resolved against the file's folder. `check_files=False`
    accepts a model and data that are not on this host (yet). Raises TopologyError with every problem found.
    """
    document = _document(path, overrides)
    folder = os.path.dirname(os.path.abspath(document.file))
    topology, broken = _validate(document, folder)
    if topology is not None:
        findings = check(topology)
        if not check_files:
            findings = (finding for finding in findings if not any(finding[0][: len(key)] == key for key in _FILES))
        _report(document, findings, broken)
    if topology is None or document.problems:
        raise TopologyError(document.problems)
    return topology


def load_resolved(path: str | os.PathLike[str]) -> Topology:
    """Load the resolved topology of a run, which the launcher has checked. The files that it names are not looked at,
    because the process that uses a file describes its faults better. Raises TopologyError."""
    return load(path, check_files=False)


def hub_names(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[Path, HubName]:
    """Return the models and data sets that a topology names by their hub names, each under the key that names it.

    A folder with the same name as a model takes precedence. Raises TopologyError if the file cannot be read.
    """
    document = _document(path, overrides)
    folder = os.path.dirname(os.path.abspath(document.file))
    data = document.data
    names = {key: parse(value) for key, parse in _hub_keys(data) if isinstance(value := value_at(data, key), str)}
    if isinstance(model := value_at(data, MODEL), str) and os.path.isdir(absolute(model, folder)):
        del names[MODEL]
    return {key: name for key, name in names.items() if name is not None}


def value_at(data: Any, key: Path) -> Any:
    """Return the value of a key in plain data, or None."""
    for part in key:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _hub_keys(data: dict[str, Any]) -> Iterator[tuple[Path, Callable[[str], HubName | None]]]:
    yield MODEL, model_name
    yield ("data", "train", "source"), source_name
    sets = value_at(data, ("data", "eval"))
    for name in sets if isinstance(sets, dict) else ():
        yield ("data", "eval", name, "source"), source_name


def _document(path: str | os.PathLike[str], overrides: Sequence[str]) -> Document:
    document = read(path)
    for setting in overrides:
        document.override(setting)
    document.place("monitor", ("services", "monitor"))
    return document


def _validate(document: Document, folder: str) -> tuple[Topology | None, list[Path]]:
    """Return the topology, built without broken keys so that the checks can find more problems, and the broken keys."""
    try:
        return _built(document.data, folder), []
    except ValidationError as error:
        errors = explain(error)
    for path, message in errors:
        document.report(path, message)
    pruned = copy.deepcopy(document.data)
    broken = [path for path, _ in errors]
    for path in broken:
        _remove(pruned, path)
    try:
        return _built(pruned, folder), broken
    except ValidationError:
        return None, broken  # too much is missing for the checks to be meaningful


def _built(data: dict[str, Any], folder: str) -> Topology:
    filled = copy.deepcopy(data)
    derive.fill(filled)
    return Topology.model_validate(filled, context={"folder": folder})


def _remove(data: Any, path: Path) -> None:
    """Remove the key at `path`. A list with a broken item is removed as a whole."""
    for part in path[:-1]:
        below = data.get(part) if isinstance(data, dict) else None
        if not isinstance(below, dict):
            path = (part,)
            break
        data = below
    if path and isinstance(data, dict):
        data.pop(path[-1], None)


def _report(document: Document, findings: Iterable[tuple[Path, str]], broken: list[Path]) -> None:
    for path, message in findings:
        # A broken key was replaced by its default, so findings about it are not about the user's value.
        if not any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in broken):
            document.report(path, message)
