"""Turns the paths a topology names into absolute ones; it never downloads and never fails on what is missing.

A relative path counts from the folder of the topology file, so that a topology means the same from every
working directory. Whether the result exists is asked in `checks`, where the file and line are known.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shared.data import FORMS

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SOURCE = re.compile(r"builtin:[A-Za-z_]\w*(\?\S+)?|(?P<file>jsonl|parquet|datasets):.+|reasoning-gym:\w+(\?\S+)?")


def absolute(value: str, folder: str) -> str:
    """`value` as an absolute, normalised path; `~` is the home folder, anything relative lies in `folder`."""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(value)))


def model_folder(value: str, folder: str) -> str:
    """The folder of the model `value`: a path, or a hub name whose snapshot lies in the local cache.

    A hub name that is found neither as a folder nor in the cache comes back as it is.
    """
    path = absolute(value, folder)
    if HUB_NAME.fullmatch(value) and not os.path.isdir(path):
        return cached_snapshot(value) or value
    return path


def source(value: str, folder: str) -> str:
    """A source of a file or folder with an absolute path; others as they are. Raises ValueError for no source."""
    found = SOURCE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a source, write {FORMS}")
    scheme, _, rest = value.partition(":")
    return f"{scheme}:{absolute(rest, folder)}" if found["file"] else value


def hub_cache() -> Path:
    """The local Hugging Face cache, by the same variables that library reads (HF_HUB_CACHE, HF_HOME)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache_home, "huggingface"))
    return Path(home).expanduser() / "hub"


def cached_snapshot(name: str) -> str | None:
    """The snapshot folder of `refs/main` of the hub model `name` in the local cache, or None."""
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return os.path.abspath(snapshot) if revision and snapshot.is_dir() else None
