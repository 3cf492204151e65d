"""Fetches the models and data sets that a topology names by their hub names into the local Hugging Face cache.

`huggingface_hub` does the work, so its environment variables are respected (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE,
HF_HOME, ...), a download that was interrupted by a broken connection is resumed, complete files are kept, and the cache
is used if the hub cannot be reached. The library is imported only for a topology with hub names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import NoReturn

from shared.data.source import nearest
from shared.os_limits import DISK_FULL_ERRNOS
from shared.topology import document, hub
from shared.topology.document import Path, dotted
from shared.topology.fields import format_size
from shared.topology.hub import HubName
from shared.topology.load import value_at

_SHARD = re.compile(r"(-\d+-of-\d+)?\.(parquet|jsonl)$")


class HubError(Exception):
    """A model or a data set could not be fetched. The message is one line."""


@dataclass(frozen=True)
class Missing:
    """Files of `name` at `commit` that are not in the cache.

    `files` is 0 if the cache has all of these files but still resolves the revision to another commit.
    """

    name: HubName
    commit: str
    files: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.files} files, {format_size(self.nbytes)}, commit {self.commit}"


def pinned(names: Mapping[Path, HubName], topology: FilePath) -> list[str]:
    """Return the overrides that keep a run at the commits that its resolved `topology` records for `names`.

    A name gets no override if it specifies a commit, or if the recorded repository is a different one.
    """
    try:
        recorded = document.plain(topology.read_text())
    except (OSError, ValueError):
        return []  # This error is reported when the run is opened.
    made = []
    for key, name in names.items():
        value = str(value_at(recorded, key))
        pin = hub.model_name(value) if name.kind == "model" else hub.source_name(value)
        if pin is not None and pin.name == name.name and not name.is_commit:
            made.append(f"{dotted(key)}={value}")
    return made


def missing(names: Mapping[Path, HubName]) -> list[Missing]:
    """Return what must be fetched for `names`. Raises HubError if this cannot be determined."""
    return [absent for name in dict.fromkeys(names.values()) if (absent := _missing(name)) is not None]


def fetch(names: Mapping[Path, HubName]) -> None:
    """Fetch the files of `names` that are not in the cache. Raises HubError."""
    for absent in missing(names):
        folder = hub.cache()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise HubError(f"{absent.name}: {folder}: {error.strerror}; name another folder with HF_HOME") from None
        if absent.nbytes > free:
            text = f"needs {format_size(absent.nbytes)}, but the disk has {format_size(free)}"
            raise HubError(f"{absent.name}: {folder} {text}; make room, or name another folder with HF_HOME")
        if absent.files:
            print(f"fetching {absent} into {folder}", flush=True)
        _download(absent.name, local_files_only=False)


def leave() -> NoReturn:
    """Exit this process at once. Otherwise, download threads would first finish their files.

    Partial files are deleted. A later download could not use them, because each has a unique name.
    """
    for descriptor in FilePath("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()
    print(
        "interrupted before anything was started; complete files are kept, and the same command fetches the rest",
        flush=True,
    )
    os._exit(1)


def _missing(name: HubName) -> Missing | None:
    """Return what must be fetched for `name`, or None if nothing is missing.

    A commit that is in the cache is not looked up. If the hub cannot be reached, the cache must have the whole
    revision.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

    if name.is_commit and _is_whole(name):
        return None
    api = HfApi()
    try:
        info = (
            api.model_info(name.name, revision=name.revision, files_metadata=True)
            if name.kind == "model"
            else api.dataset_info(name.name, revision=name.revision, files_metadata=True)
        )
    except errors.HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise HubError(_refused(name, error)) from None
        _offline(name, f"{_endpoint()} answered {error.response.status_code}")
        return None
    except (OSError, HTTPError) as error:
        _offline(name, _reason(error))
        return None
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    files = [file for file in sizes if name.wants(file)]
    if not files:
        raise HubError(_no_file(name, list(sizes)))
    folder = hub.cache().absolute() / name.folder / "snapshots" / str(info.sha)
    absent = [file for file in files if not (folder / file).exists()]
    if not absent and hub.snapshot(name) == folder:
        return None
    return Missing(name, str(info.sha), len(absent), sum(sizes[file] for file in absent))


def _offline(name: HubName, reason: str) -> None:
    """Raise HubError, with the command that fetches `name`, unless the cache contains every file of `name`."""
    if not _is_whole(name):
        command = f"fetch it where there is a network, with: {name.command}"
        raise HubError(f"{name}: not complete in the local Hugging Face cache {hub.cache()}, and {reason}; {command}")


def _is_whole(name: HubName) -> bool:
    from huggingface_hub import errors

    try:
        _download(name, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        return False
    # The library cannot tell whether a revision is complete if another release of the library fetched it.
    return name.kind == "model" or hub.source_files(f"hub:{name}") is not None


def _download(name: HubName, *, local_files_only: bool) -> None:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

    try:
        snapshot_download(
            name.name,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=name.wanted,
            ignore_patterns=name.unwanted,
            local_files_only=local_files_only,
        )
    except errors.LocalEntryNotFoundError as error:
        if local_files_only:
            raise
        raise HubError(_broken_off(name, str(error.__cause__ or error))) from None
    except errors.HfHubHTTPError as error:
        raise HubError(_refused(name, error)) from None
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            text = f"{hub.cache()}: {error.strerror}; make room, or name another folder with HF_HOME"
            raise HubError(f"{name}: {text}; complete files are kept") from None
        raise HubError(_broken_off(name, str(error))) from None
    except HTTPError as error:
        raise HubError(_broken_off(name, str(error))) from None


def _broken_off(name: HubName, reason: str) -> str:
    line = " ".join(reason.split())[:200]
    return (
        f"{name}: the download was interrupted ({line}); complete files are kept, and the same command fetches the rest"
    )


def _refused(name: HubName, error: Exception) -> str:
    """Return one line that describes an error returned by the hub, and its remedy."""
    from huggingface_hub import errors

    page = f"{_endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.name}"
    match error:
        case errors.GatedRepoError():
            return f"{name}: access is restricted; accept the terms at {page}, and set HF_TOKEN (or run: hf auth login)"
        case errors.RepositoryNotFoundError():
            where = "no folder here, and the" if name.kind == "model" else "the"
            return f"{name}: {where} {name.kind} {page} is missing or private; correct the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"{name}: {page} has no revision {name.revision!r}; give a branch, a tag or a commit after the @"
        case errors.HfHubHTTPError():
            return f"{name}: {page} answered {error.response.status_code}; try again later"
        case _:
            return f"{name}: {page}: {_reason(error)}"


def _no_file(name: HubName, files: list[str]) -> str:
    what = "safetensors or JSON file" if name.kind == "model" else f"Parquet or JSONL file {name.path}*"
    # The path in a hub name omits the suffix and the shard numbers.
    paths = {_SHARD.sub("", file) for file in files}
    return f"{name}: the {name.kind} has no {what}{nearest(name.path, paths)}"


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return f"{_endpoint()} cannot be reached ({' '.join(str(error).split())[:200] or type(error).__name__})"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
