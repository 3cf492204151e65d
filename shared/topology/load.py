"""`load` turns a YAML file and `--set` overrides into a checked Topology, or reports all problems.

Each problem is one line that names file and line and, for a wrong key, the nearest valid one. Nothing is started,
created or downloaded.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shared.topology import derive, serve
from shared.topology.checks import check
from shared.topology.document import Document, Path, TopologyError, dotted, read, shown
from shared.topology.fields import absolute, not_one_of
from shared.topology.hub import HubName, model_name, source_name
from shared.topology.models import CRITIC, POLICY, REWARD_MODEL_SECTION, TEACHER
from shared.topology.schema import Topology

_MODELS: tuple[Path, ...] = tuple((name, "model") for name in (POLICY, CRITIC, TEACHER, REWARD_MODEL_SECTION, "reward"))
_FILES: tuple[Path, ...] = (*_MODELS, (POLICY, "lora", "adapter_path"), ("data",))
"""Keys whose values name files."""
_FORMER: dict[tuple[str, ...], tuple[str, ...]] = {("services", "monitor"): ("monitor",)}
"""Former places of sections, which files and overrides may still use, with their present places."""


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
    for key in _MODELS:
        if isinstance(model := value_at(data, key), str) and os.path.isdir(absolute(model, folder)):
            del names[key]
    return {key: name for key, name in names.items() if name is not None}


def written(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys that the file and the overrides give, without derived values and defaults, as plain data.

    Raises TopologyError if the file cannot be read.
    """
    return _document(path, overrides).data


def value_at(data: Any, key: Path) -> Any:
    """Return the value of a key in plain data, or None. The part `*` of a key stands for every name."""
    for number, part in enumerate(key, 1):
        if part == "*" and isinstance(data, dict):
            return {name: value_at(value, key[number:]) for name, value in data.items()}
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _hub_keys(data: dict[str, Any]) -> Iterator[tuple[Path, Callable[[str], HubName | None]]]:
    yield from ((key, model_name) for key in _MODELS)
    yield ("data", "train", "source"), source_name
    for several in (("data", "train", "sources"), ("data", "eval")):
        sets = value_at(data, several)
        for name in sets if isinstance(sets, dict) else ():
            yield (*several, name, "source"), source_name


def _document(path: str | os.PathLike[str], overrides: Sequence[str]) -> Document:
    document = read(path)
    for old, new in _FORMER.items():
        document.move(old, new)
    for setting in overrides:
        document.override(setting, _FORMER)
    return document


def _validate(document: Document, folder: str) -> tuple[Topology | None, list[Path]]:
    """Return the topology, built without broken keys so that the checks can find more problems, and the broken keys."""
    errors = list(serve.misplaced(document.data))
    pruned = copy.deepcopy(document.data)
    for path, _ in errors:
        _remove(pruned, path)
    try:
        topology = _built(pruned, folder)
    except ValidationError as error:
        errors += explain(error)
        topology = None
    for path, message in _once(errors):
        document.report(path, message)
    broken = [path for path, _ in errors]
    if topology is not None:
        return topology, broken
    for path in broken:
        _remove(pruned, path)
    try:
        return _built(pruned, folder), broken
    except ValidationError:
        return None, broken  # too much is missing for the checks to be meaningful


def _built(data: dict[str, Any], folder: str) -> Topology:
    filled = copy.deepcopy(data)
    serve.fill(filled)
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
    for path, message in _once(findings):
        # A broken key was replaced by its default, so findings about it are not about the user's value.
        if not any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in broken):
            document.report(path, message)


def _once(findings: Iterable[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Leave out the findings about services.critic that are those about services.policy-trainer, which gives it the
    values that are not written."""
    every = list(findings)
    given = {(path[2:], message) for path, message in every if path[:2] == ("services", "policy-trainer")}
    return [
        (path, message)
        for path, message in every
        if path[:2] != ("services", CRITIC) or (path[2:], message) not in given
    ]


_CHANGES_DISTRIBUTION = "would change the distribution that the log-probs of training samples describe; remove it"
_CHANGING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_REFUSED: dict[Path, str] = {
    **{("sampling", name): _CHANGES_DISTRIBUTION for name in _CHANGING},
    (POLICY, "lora", "dropout"): "would have no counterpart in the engines, which have no dropout; remove it",
    (CRITIC, "lora"): "is not supported: all weights of a critic are trained, also with policy.lora; remove it",
}
_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be {} or less"),
}


def explain(error: ValidationError) -> list[tuple[Path, str]]:
    """Return the path and the message of every error in a failed Topology validation."""
    return [(_path(details), _message(details)) for details in error.errors(include_url=False)]


def _path(details: ErrorDetails) -> Path:
    # "[key]" marks an error in the key of a mapping. The path of the error is that of the key.
    return tuple(part for part in details["loc"] if part != "[key]")


def _message(details: ErrorDetails) -> str:
    path, kind, value, context = _path(details), details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return _described("required, but missing", path)
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _not_a_choice(path, value, str(context["expected"]))
    if kind in _KINDS:
        return _described(f"{shown(value)} is not {_KINDS[kind]}", path)
    if kind in _BOUNDS:
        name, bound = _BOUNDS[kind]
        return _described(f"{shown(value)} is out of range: it {bound.format(_short(context[name]))}", path)
    if kind == "too_long":
        return _described(f"{shown(value)} is too long: it can have at most {context['max_length']} items", path)
    if kind in ("string_pattern_mismatch", "string_too_short"):
        return _described(f"{shown(value)} does not have the required form", path)
    return _described(f"{shown(value)}: {details['msg']}", path)


def _short(bound: int | float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _unknown(path: Path) -> str:
    key = str(path[-1])
    refused = _REFUSED.get(path)
    if refused:
        return f"not a key: it {refused}"
    if key == "dp":
        return "not a key; dp is derived from gpus and the other parallel sizes; remove it"
    valid = sorted(_properties(_node(path[:-1])))
    near = difflib.get_close_matches(key, valid, n=1)
    if near:
        return f"unknown key, nearest valid key {near[0]!r}"
    elsewhere = [name for name in _all_keys() if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key here; it belongs at {' or '.join(elsewhere)}"
    return f"unknown key, valid keys here: {', '.join(valid)}"


def _not_a_choice(path: Path, value: object, expected: str) -> str:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    return _described(not_one_of(value, choices), path)


def _described(message: str, path: Path) -> str:
    description = _node(path).get("description")
    return f"{message} ({description})" if description else message


@cache
def _schema() -> Mapping[str, Any]:
    # The JSON schema is pydantic's own description of the models by alias. It is built only when there is an error.
    schema: Mapping[str, Any] = Topology.model_json_schema(by_alias=True)
    return schema


def _resolve(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve references and `| null` in `node`, keeping the description nearest to the field."""
    seen: dict[str, Any] = dict(node)
    while True:
        options = [option for option in seen.get("anyOf", []) if option.get("type") != "null"]
        if options:
            inner: Mapping[str, Any] = options[0]
        elif "$ref" in seen:
            inner = _schema()["$defs"][seen["$ref"].rpartition("/")[2]]
        else:
            return seen
        outer = {key: value for key, value in seen.items() if key == "description"}
        seen = {**inner, **outer}


def _properties(node: Mapping[str, Any]) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = node.get("properties", {})
    return properties


def _node(path: Path) -> Mapping[str, Any]:
    """Return the schema of the key at `path`, or {} if the schema does not describe the key."""
    node = _resolve(_schema())
    for part in path:
        items = node.get("items", {})
        others: Any = node.get("additionalProperties") or next(iter(node.get("patternProperties", {}).values()), {})
        below = items if isinstance(part, int) else _properties(node).get(part, others)
        node = _resolve(below) if isinstance(below, Mapping) else {}
    return node


@cache
def _all_keys() -> tuple[str, ...]:
    def walk(node: Mapping[str, Any], path: Path) -> Iterator[str]:
        for key, below in _properties(node).items():
            yield dotted((*path, key))
            yield from walk(_resolve(below), (*path, key))

    return tuple(walk(_resolve(_schema()), ()))
