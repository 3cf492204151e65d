"""Finds models and data sets by their Hugging Face hub names, and their folders in the local cache.

It knows the layout of the cache, `<kind>s--<owner>--<name>/snapshots/<commit>/`, and does not use the network.
`launch.checks.hub` fetches missing files. A resolved topology names the folder of a commit, so every later start uses
that commit. A host with a different cache looks up the same commit in its own cache.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from shared.data.open import matching_files, split_parameters

_NAME = r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>refs/(convert|pr)/\w+|[\w.-]+))?"
_MODEL = re.compile(_NAME)
SOURCE = re.compile(rf"hub:{_NAME}/(?P<path>[^?@]*[^?@/])(\?(?P<query>\w+=[^/?]*))?")
_SNAPSHOT = re.compile(
    r".*/(?P<folder>(?P<kind>model|dataset)s--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)"
    r"/snapshots/(?P<revision>[0-9a-f]{40}))(/(?P<path>.+))?"
)
_COMMIT = re.compile("[0-9a-f]{40}")
_KINDS = (".parquet", ".jsonl")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Copies of the weights in other formats and layouts, and the folders that hold them.
_OTHER_FILES = ("*/*", "consolidated*")


@dataclass(frozen=True)
class HubName:
    """A model, or the files of a data set at `path`. The path omits the suffix and the shard numbers."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str = "main"
    path: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.name}{revision}{f'/{self.path}' if self.path else ''}"

    @property
    def folder(self) -> str:
        """Return the name of the repository's folder in the cache."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def wanted(self) -> list[str]:
        """Return the patterns that match the files to fetch."""
        return list(_MODEL_FILES) if self.kind == "model" else [self.path, *_files_of(self.path)]

    @property
    def unwanted(self) -> list[str]:
        """Return the patterns of files that are not fetched even though `wanted` matches them."""
        return list(_OTHER_FILES) if self.kind == "model" else []

    def wants(self, file: str) -> bool:
        """Return whether to fetch a file from the repository."""
        wanted, unwanted = (
            [fnmatchcase(file, pattern) for pattern in patterns] for patterns in (self.wanted, self.unwanted)
        )
        return any(wanted) and not any(unwanted)

    @property
    def command(self) -> str:
        """Return the command that fetches these files into the local cache."""
        words = ["hf", "download", self.name]
        if self.kind == "dataset":
            words += ["--repo-type", "dataset", "--include", self.path if "*" in self.path else f"{self.path}*"]
        if self.revision != "main":
            words += ["--revision", self.revision]
        return shlex.join(words)


def cache() -> Path:
    """Return the local Hugging Face cache, found through the library's own variables (HF_HUB_CACHE, HF_HOME)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache_home, "huggingface"))
    return Path(home).expanduser() / "hub"


def model_name(value: str) -> HubName | None:
    """Return the hub model that `policy.model` names, directly or as the folder of a snapshot, or None."""
    if match := _MODEL.fullmatch(value):
        return HubName("model", match["name"], match["revision"] or "main")
    return _snapshot_name(value, "model")


def source_name(value: str) -> HubName | None:
    """Return the hub data set that a source names, either as `hub:...` or by files in a snapshot, or None for any other
    source."""
    if match := SOURCE.fullmatch(value):
        return HubName("dataset", match["name"], match["revision"] or "main", match["path"])
    return _snapshot_name(split_parameters(value.partition(":")[2])[0], "dataset")


def model_folder(value: str) -> str | None:
    """Return the folder of a hub model in the local cache, or None."""
    name = model_name(value)
    folder = snapshot(name) if name is not None else None
    return str(folder) if folder is not None else None


def source_files(value: str) -> str | None:
    """Return the source that reads the files of a `hub:` source or of a snapshot from the local cache, or None."""
    name = source_name(value)
    folder = snapshot(name) if name is not None else None
    if name is None or folder is None:
        return None
    query = split_parameters(value.partition(":")[2])[1]
    for pattern in (name.path, *_files_of(name.path)):
        kind = Path(pattern).suffix
        files = [file for file in matching_files(str(folder / pattern)) if file.is_file()]
        if kind in _KINDS and files:
            path = files[0] if len(files) == 1 else folder / pattern
            return f"{kind.removeprefix('.')}:{path}{f'?{query}' if query else ''}"
    return None


def _files_of(path: str) -> list[str]:
    return [f"{path}{form}{suffix}" for suffix in _KINDS for form in ("", "-*", "/*")]


def _snapshot_name(path: str, kind: Literal["model", "dataset"]) -> HubName | None:
    match = _SNAPSHOT.fullmatch(path)
    if match is None or match["kind"] != kind or bool(match["path"]) != (kind == "dataset"):
        return None
    return HubName(kind, f"{match['owner']}/{match['name']}", match["revision"], match["path"] or "")


def snapshot(name: HubName) -> Path | None:
    """Return the folder of a revision in the local cache, or None."""
    repository = cache() / name.folder
    try:
        commit = (repository / "refs" / name.revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = name.revision
    folder = Path(os.path.abspath(repository / "snapshots" / commit))
    return folder if commit and folder.is_dir() else None
