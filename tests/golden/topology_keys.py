"""Writes docs/keys.md, the list of all topology keys, from the schema: `python -m tests.golden.topology_keys`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from launch.checks.resumed import FIXED, FIXED_BITS, PASSES
from shared.topology.fields import Section, format_size, parse_size
from shared.topology.schema import Topology
from shared.topology.service_checks import UNSUPPORTED

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
HEAD = """# Topology keys

A run is described by one YAML file, the *topology*. [launch/topologies/](../launch/topologies) has examples, and
[status.md](status.md) lists the options that have run.

```
python -m launch.cluster my.yaml --dry-run
python -m launch.cluster my.yaml --set optimizer.lr=1e-4 --run-dir runs/first
python -m launch.cluster my.yaml --run-dir runs/first --resume
```

- Paths in a topology are relative to the folder that contains it. `--set` changes one key and can be repeated.
- `--dry-run` starts nothing and performs the checks that precede a start: keys, limits, data rows, ports, memory and
  GPUs; the model's configuration, weight files (truncated, or named in the index but missing), tokenizer and chat
  template; and your own functions with their parameters, which are imported in a killable process, where reward
  functions are also [called with a row](your_code.md#rewards-are-called-before-a-run). Errors that only a
  model library can detect are found when the service starts; the run then ends at once and prints the error line.
- A model or a data set that is given by its hub name is fetched first ([hub.md](hub.md)); `--dry-run` reports what
  would be fetched.
- A wrong key causes exit status 2 and a one-line error that names the file, the line and the nearest valid key.
- An option that would have no effect under the given topology is an error. `tests/unit/shared/topology/test_keys.py`
  covers every key.
- The resolved topology, with all defaults, is `topology.yaml` in the run directory. `--resume` refuses other values of
  the keys that are marked *fixed* ([stopping.md](stopping.md#keys-that-may-change)).
- Keys of `monitor` may also be written below `services`, as in earlier releases; `--set` takes both forms.

In the tables, `<name>` stands for a name of your choice, and `[]` for the items of a list. The page is written from
[shared/topology/](../shared/topology) by `python -m tests.golden.topology_keys`.
"""


def section_of(hint: Any) -> tuple[str, type[Section]] | None:
    """Return the section that a field of this type holds, and the separator between the field's key and the section's
    keys."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Section):
        return "", hint
    if origin is Annotated or origin in (typing.Union, types.UnionType):
        return next(filter(None, map(section_of, inside)), None)
    if origin in (dict, tuple):
        found = section_of(inside[1 if origin is dict else 0])
        return (("." + "<name>" if origin is dict else "[]"), found[1]) if found else None
    return None


def values_of(hint: Any) -> list[str]:
    """Return the allowed values of a field, or none if any value of its type is allowed."""
    if typing.get_origin(hint) is Literal:
        return [str(value) for value in typing.get_args(hint)]
    return [value for each in typing.get_args(hint) for value in values_of(each)]


def default_of(field: FieldInfo) -> str:
    """Return the default of a field, written as in a topology. The string is empty if there is no default, or if the
    description states the default."""
    if field.is_required():
        return "*required*"
    if "default" in (field.description or ""):
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}) or isinstance(value, Section):
        return ""
    if any(getattr(each, "func", None) is parse_size for each in field.metadata):
        return f"`{format_size(value).replace(' ', '')}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def refused(key: str) -> str:
    """If this version refuses the key or some of its values, return a sentence that says so; otherwise return an empty
    string."""
    refused_keys = [f"services.rollout.parallel.{name}" for name in UNSUPPORTED]
    return ". *Not available in this version; use 1.*" if key in refused_keys else ""


def fixed(key: str) -> str:
    """Return a mark for a key of which a run that is resumed must have its first value."""

    def below(keys: Iterable[str]) -> bool:
        return any(f"{key}.".startswith(f"{each.replace('*', '<name>')}.") for each in keys)

    always = below(FIXED) and not below(PASSES)
    return ". *Fixed.*" if always else ". *Fixed if deterministic.*" if below((*FIXED, *FIXED_BITS)) else ""


def rows(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the table row for every key of a section and of its nested sections."""
    hints = typing.get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inside = section_of(hints[name])
        if inside is None or inside[0] == "[]":
            values = values_of(hints[name])
            text = (field.description or "").replace("|", "\\|").replace("<", "\\<")
            listed = f" ({', '.join(f'`{value}`' for value in values)})" if values else ""
            yield f"| `{key}` | {default_of(field)} | {text}{listed}{refused(key)}{fixed(key)} |"
        if inside is not None:
            yield from rows(inside[1], f"{key}{inside[0]}.")


def table(lines: Iterable[str]) -> str:
    """Return the table with these rows."""
    return "| key | default | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, field in Topology.model_fields.items():
        key = field.alias or name
        inside = section_of(typing.get_type_hints(Topology, include_extras=True)[name])
        if inside is None:
            continue
        parts += [f"## `{key}`: {field.description}\n", table(rows(inside[1], f"{key}."))]
    alone = [name for name in Topology.model_fields if section_of(Topology.model_fields[name].annotation) is None]
    parts.append("## Keys outside of a section\n")
    listed = [row for row in rows(Topology) if row.split("`")[1] in alone]
    parts.append(table(listed))
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(page())
