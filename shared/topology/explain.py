"""Turns pydantic errors into one-line problems that name the nearest valid key. It does not validate anything
itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shared.topology.problem import Path, dotted, shown
from shared.topology.schema import Topology

_CHANGES_DISTRIBUTION = "would change the distribution that the log-probs of training samples describe; remove it"
_CHANGING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_REFUSED: dict[Path, str] = {("sampling", name): _CHANGES_DISTRIBUTION for name in _CHANGING}
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
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f", nearest {near[0]!r}" if near else ""
    return _described(f"{shown(value)} is not one of {', '.join(choices)}{hint}", path)


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
