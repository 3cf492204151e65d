"""Turns the paths that a topology names into absolute paths. It does not download anything and accepts missing files.

Relative paths are resolved against the folder of the topology file, so a topology has the same meaning in every working
directory. `checks` tests whether the resulting paths exist, and its findings are reported with file and line.
"""

from __future__ import annotations

import os
import re

from shared.data import FORMS
from shared.data.open import matching_files, split_parameters
from shared.topology import hub

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
