"""The field types of the schema. Sections and checks across fields are in other files.

Relative paths are resolved against the folder of the topology file, so a topology has the same meaning in every working
directory. Missing files are accepted: `checks` tests whether paths exist, and its findings have file and line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from shared.data import FORMS
from shared.data.open import matching_files, split_parameters
from shared.topology import hub
from shared.topology.document import shown

SOURCE = re.compile(r"builtin:[A-Za-z_]\w*(\?\S+)?|(?P<file>jsonl|parquet|datasets):.+|reasoning-gym:\w+(\?\S+)?")


def absolute(value: str, folder: str) -> str:
    """Return `value` as an absolute, normalised path. `~` is the home folder; relative paths are resolved against
    `folder`."""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(value)))


def model_folder(value: str, folder: str) -> str:
    """Return the folder of the model `value`: a path, or a hub name whose snapshot is in the local cache.

    A hub name that is found neither as a folder nor in the cache is returned unchanged.
    """
    path = absolute(value, folder)
    if os.path.isdir(path):
        return path
    return hub.model_folder(value) or (value if hub.model_name(value) else path)


def source(value: str, folder: str) -> str:
    """Make the path of a file or folder source absolute; return other sources unchanged. Raises ValueError for other
    text.

    A hub source becomes a source of its files in the local cache, if they are there.
    """
    if hub.SOURCE.fullmatch(value):
        return hub.source_files(value) or value
    match = SOURCE.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a source; write {FORMS}")
    if not match["file"]:
        return value
    scheme, _, rest = value.partition(":")
    made = f"{scheme}:{absolute(rest, folder)}"
    if any(file.exists() for file in matching_files(split_parameters(made.partition(":")[2])[0])):
        return made
    return hub.source_files(made) or made


_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})")


class Section(BaseModel):
    """A mapping of the topology with strict types and no unknown keys, frozen after loading."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,
    )


def parse_size(value: object) -> object:
    """Convert `"64GiB"` or `"1.5 GB"` to bytes; an integer is already in bytes. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with {', '.join(_UNITS)}, such as 64GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(size_bytes: int) -> str:
    """Format a number of bytes for human readers: `1.5 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.1f} {unit}"
    return f"{size_bytes} B"


def not_one_of(value: object, choices: Sequence[str]) -> str:
    """Return the text about a value that is none of `choices`, with the nearest of them."""
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"{shown(value)} is not one of {', '.join(choices)}{f', nearest {near[0]!r}' if near else ''}"


def _in_folder(resolve: Callable[[str, str], str]) -> AfterValidator:
    """Return a validator that passes a value and the topology's folder to `resolve`."""

    def check(value: str, info: ValidationInfo) -> str:
        folder = (info.context or {}).get("folder")
        if not isinstance(folder, str):
            raise ValueError("a topology is validated through shared.topology.load, which knows its folder")
        return resolve(value, folder)

    return AfterValidator(check)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Seconds = Annotated[float, Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
LocalPath = Annotated[str, Field(min_length=1), _in_folder(absolute)]
ModelFolder = Annotated[str, Field(min_length=1), _in_folder(model_folder)]
DataSource = Annotated[str, _in_folder(source)]
Function = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
# YAML has only lists. Tuples keep a frozen section frozen, and their items are still validated strictly.
Strings = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_listed)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
