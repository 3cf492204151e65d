"""Turns the paths that a topology names into absolute ones. It downloads nothing and accepts missing files.

Relative paths start at the folder of the topology file, so that a topology means the same from every working
directory. `checks` tests whether the results exist, because it knows the file and line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shared.data import FORMS

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SOURCE = re.compile(r"builtin:[A-Za-z_]\w*(\?\S+)?|(?P<file>jsonl|parquet|datasets):.+|reasoning-gym:\w+(\?\S+)?")


def absolute(value: str, folder: str) -> str:
    """Return `value` as an absolute, normalised path. `~` is the home folder; relative paths start at `folder`."""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(value)))


def model_folder(value: str, folder: str) -> str:
    """Return the folder of the model `value`: a path, or a hub name whose snapshot is in the local cache.

    A hub name that is found neither as a folder nor in the cache is returned unchanged.
    """
    path = absolute(value, folder)
    if HUB_NAME.fullmatch(value) and not os.path.isdir(path):
        return cached_snapshot(value) or value
    return path


def source(value: str, folder: str) -> str:
    """Make the path of a file or folder source absolute; leave others unchanged. Raises ValueError for other text."""
    found = SOURCE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a source; write {FORMS}")
    scheme, _, rest = value.partition(":")
    return f"{scheme}:{absolute(rest, folder)}" if found["file"] else value


def hub_cache() -> Path:
    """Return the local Hugging Face cache, found by the library's own variables (HF_HUB_CACHE, HF_HOME)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache_home, "huggingface"))
    return Path(home).expanduser() / "hub"


def cached_snapshot(name: str) -> str | None:
    """Return the snapshot folder of `refs/main` of the hub model `name` in the local cache, or None."""
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return os.path.abspath(snapshot) if revision and snapshot.is_dir() else None
