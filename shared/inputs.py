"""The record of a run's inputs, `inputs.json` in its directory: the rows and the models with which it began.

Rows are recorded as digests (`shared.data.source`), and the files of a model by digests of their content. Reading all
bytes of a large model takes long, so a file whose size, inode, and times of modification and change are those on record
counts as unchanged. The digests (XXH3) reveal mistakes; they do not protect against someone who wants a collision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from shared.data.source import RowDigests
from shared.rpc.errors import BadInput

_MODEL_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "additional_chat_templates/*.jinja",
)
"""Patterns of the files of a model folder on which weights, tokens and prompts depend."""
_READ_BYTES = 1 << 22


class ModelFile(msgspec.Struct, frozen=True):
    """A file of a model. `stamp` is its inode and its times of modification and change, in nanoseconds; `digest` is
    empty until the file has been read."""

    size: int
    stamp: tuple[int, int, int]
    digest: str = ""


Model = Mapping[str, ModelFile]
"""The files of a model by their names in its folder."""


class Inputs(msgspec.Struct, frozen=True):
    """The rows of the data sets and the models of a run, each by the topology key that names it."""

    rows: dict[str, RowDigests] = {}
    models: dict[str, dict[str, ModelFile]] = {}

    @classmethod
    def load(cls, run: Path) -> Inputs:
        """Return the record in the run directory `run`, which is empty if the run began without one.

        Raises BadInput for a file that is damaged, and OSError.
        """
        path = _path(run)
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (msgspec.MsgspecError, ValueError) as error:
            text = f"{path}: damaged ({error}); restore it, or delete it to resume the run without comparing its inputs"
            raise BadInput(text) from None

    def save(self, run: Path) -> None:
        """Write the record into the run directory `run`, atomically. Raises OSError."""
        scratch = _path(run).with_suffix(".partial")
        scratch.write_bytes(msgspec.json.encode(self))
        scratch.replace(_path(run))


def model_files(folder: Path) -> dict[str, ModelFile]:
    """Return the files of the model in `folder`, without digests. Raises OSError."""
    found = {}
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        status = path.stat()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        found[str(path.relative_to(folder))] = ModelFile(status.st_size, stamp)
    return found


def with_digest(folder: Path, name: str, file: ModelFile, stopped: Callable[[], bool] = lambda: False) -> ModelFile:
    """Return `file` with the digest of its content, or unchanged if it has changed since, or `stopped` returns true.

    Raises OSError.
    """
    digest = xxhash.xxh3_128()
    with (folder / name).open("rb", buffering=0) as opened:
        while part := opened.read(_READ_BYTES):
            if stopped():
                return file
            digest.update(part)
        status = os.fstat(opened.fileno())
    if (status.st_ino, status.st_mtime_ns, status.st_ctime_ns) != file.stamp:
        return file
    return msgspec.structs.replace(file, digest=digest.hexdigest())


def compared(folder: Path, begun: Model) -> dict[str, ModelFile]:
    """Return the files of the model in `folder` now. Those that `changed` must compare by their content have a digest.

    Raises OSError.
    """
    now = {}
    for name, file in model_files(folder).items():
        old = begun.get(name)
        if old is not None and (old.size, old.stamp) == (file.size, file.stamp):
            now[name] = old
        elif old is not None and old.size == file.size and old.digest:
            now[name] = with_digest(folder, name, file)
        else:
            now[name] = file
    return now


def changed(begun: Model, now: Model) -> list[str]:
    """Return one half-sentence for each file that was added, removed or changed since `begun`."""
    lines = [f"{name} was added" for name in sorted(now.keys() - begun.keys())]
    lines += [f"{name} is missing" for name in sorted(begun.keys() - now.keys())]
    for name in sorted(begun.keys() & now.keys()):
        old, new = begun[name], now[name]
        if old.size != new.size or (old.digest and new.digest != old.digest):
            lines.append(f"{name} has changed")
    return lines


def shortened(whys: Sequence[str]) -> str:
    """Return the first of these half-sentences, and how many more there are."""
    return whys[0] if len(whys) == 1 else f"{whys[0]}, and {len(whys) - 1} more files differ"


def check_model(run: Path, key: str, folder: str) -> None:
    """Raise BadInput unless the model in `folder`, which `key` of the topology names, is still the one with which the
    run in `run` began. A run directory without a record, as on a host that joined the run, is not checked.

    Raises OSError.
    """
    begun = Inputs.load(run).models.get(key)
    if begun and (whys := changed(begun, compared(Path(folder), begun))):
        text = f"{folder} is not the model with which the run in {run} began: {shortened(whys)}"
        raise BadInput(f"{key}: {text}; restore it and resume the run, or begin a new run")


def uncertain(begun: Model, now: Model) -> bool:
    """Return whether a file may have changed in a way that cannot be told, because its first content is not known."""
    return any(not old.digest and name in now and old.stamp != now[name].stamp for name, old in begun.items())


def _path(run: Path) -> Path:
    return run / "inputs.json"
