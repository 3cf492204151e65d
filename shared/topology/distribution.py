"""The files that other hosts fetch from the home host (`policy.distribute`): the folders of models and of an adapter,
and the data files.

Both ends work on the resolved topology as plain data, because the files do not exist yet on the host that fetches them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any

import msgspec

from proto.errors import WireError
from shared.data.open import matching_files, pattern_of, split_parameters
from shared.names import listed
from shared.topology.document import Path
from shared.topology.models import REWARD_MODEL_SECTION, TEACHER, WORKERS

SPLIT = "files"
"""Split of the task ids under which a store serves the files. Index 0 is the list of the files, as JSON."""
_FILES = ("jsonl", "parquet", "datasets")


class DistributedFile(msgspec.Struct, frozen=True):
    """One entry in the list of files."""

    path: str
    """Path relative to the folder of a host that fetches the files."""
    nbytes: int


def files(data: Mapping[str, Any]) -> list[tuple[DistributedFile, FilePath]]:
    """Return every distributed file of the topology `data`, with its path on the home host."""
    distributed = []
    for path, place in _places(data).items():
        root = FilePath(path)
        every = [file for file in root.rglob("*") if file.is_file()] if root.is_dir() else matching_files(path)
        for file in sorted(listed(every)):
            name = PurePosixPath(place.partition("/")[0]) / file.relative_to(_above(path))
            distributed.append((DistributedFile(str(name), file.stat().st_size), file))
    return distributed


def relocated(data: Mapping[str, Any], folder: FilePath) -> dict[str, Any]:
    """Return the topology `data` with all distributed files in `folder`."""
    made = copy.deepcopy(dict(data))
    places = _places(data)
    for key, path in _keys(data):
        section: Any = made
        for part in key[:-1]:
            section = section[part]
        section[key[-1]] = section[key[-1]].replace(path, str(folder / places[path]), 1)
    return made


def inside(folder: FilePath, file: DistributedFile) -> FilePath:
    """Return the path at which a host keeps a file. Raises WireError if it is not inside `folder`."""
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or not path.parts or file.nbytes < 0:
        raise WireError(f"distributed file {file.path[:80]!r} of {file.nbytes} bytes: not inside the folder of a host")
    return folder / path


def _places(data: Mapping[str, Any]) -> dict[str, str]:
    """Return a map from each path on the home host to its place in a host's folder; the place ends with the same name
    or pattern."""
    paths = dict.fromkeys(path for _, path in _keys(data))
    return {path: f"{number}/{FilePath(path).relative_to(_above(path))}" for number, path in enumerate(paths)}


def _above(path: str) -> FilePath:
    """Return the folder of a path, or the folder in which its pattern matches."""
    folder, pattern = pattern_of(path)
    return folder if pattern else folder.parent


def _keys(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield each key that names a distributed file or folder, and the path that its value contains."""
    for name in (*WORKERS, TEACHER, REWARD_MODEL_SECTION, "reward"):
        if (data.get(name) or {}).get("model") is not None:
            yield (name, "model"), data[name]["model"]
    adapter = (data["policy"].get("lora") or {}).get("adapter_path")
    if adapter is not None:
        yield ("policy", "lora", "adapter_path"), adapter
    sets = {("train",): data["data"]["train"]} | {("eval", name): section for name, section in _evals(data).items()}
    for key, section in sets.items():
        scheme, _, path = section["source"].partition(":")
        if scheme in _FILES:
            yield ("data", *key, "source"), split_parameters(path)[0]


def _evals(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data["data"].get("eval") or {}
