"""Atomically creates folders from which Hugging Face libraries can load a model. It does not import torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors.numpy import load_file

from shared.checkpoint_files import MODEL
from shared.model import adapter_files
from shared.topology.lora import Lora
from shared.topology.model_files import end_tokens

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5", ".onnx")
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK})
"""Errors that mean that the file system cannot create a hard link to a file."""


def begin(target: Path) -> Path:
    """Remove the leftovers of an interrupted attempt. Return the folder to fill instead of `target`; it does not exist
    yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (_partial(target), _replaced(target)):
        shutil.rmtree(leftover, ignore_errors=True)
    return _partial(target)


def finish(source: Path, target: Path) -> None:
    """Add the files of the model `source` that are not weights to the filled folder, and move it to `target`.

    A folder without a configuration holds only an adapter, which needs no such files. Raises OSError (no space, no
    permission).
    """
    partial = _partial(target)
    if (partial / CONFIG).exists():
        complete(source, partial)
    for path in filter(Path.is_file, partial.rglob("*")):
        path.chmod(0o644)  # safetensors writes 0600, which another user's engine cannot read
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        target.rename(_replaced(target))
    partial.rename(target)
    shutil.rmtree(_replaced(target), ignore_errors=True)


def complete(source: Path, folder: Path) -> None:
    """Add the files of the model `source` that are not weights to `folder`, which has a configuration."""
    for each in sorted(source.iterdir()):
        written = folder / each.name
        if each.is_file() and not written.exists() and not each.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(each, written)
    _write_ends(source, folder / GENERATION_CONFIG)


def write_config(source: Path, folder: Path, dtype: str) -> None:
    """Write the configuration of the model `source` for weights with another data type."""
    config = json.loads((source / CONFIG).read_bytes())
    config.pop("torch_dtype", None)  # the older name of the same key
    (folder / CONFIG).write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


def _write_ends(source: Path, file: Path) -> None:
    """Write the tokens at which the policy was sampled into the folder's generation_config.json."""
    ends = end_tokens(str(source))
    if not ends:
        return
    settings = json.loads(file.read_bytes()) if file.exists() else {}
    named = ends[0] if len(ends) == 1 else ends
    file.write_text(json.dumps({**settings, "eos_token_id": named}, indent=2) + "\n")


def from_checkpoint(
    checkpoint: Path,
    source: Path,
    target: Path,
    dtype: str,
    notes: Mapping[str, str] = MappingProxyType({}),
    *,
    lora: Lora | None = None,
) -> None:
    """Make `target` from a checkpoint's weights, whose data type is `dtype`, and the other files of the model `source`.
    If the checkpoint holds an adapter, `lora` must describe it.

    `notes` maps the names of additional files to their text. Where the file system allows it, the weights are a hard
    link to the checkpoint's file, so they take up no space and outlive the checkpoint. Raises OSError.
    """
    partial = begin(target)
    partial.mkdir()
    if lora is None:
        _link(checkpoint / MODEL, partial / MODEL)
    else:
        adapter_files.export(partial, source, lora, dtype, load_file(checkpoint / MODEL))
    for name, text in notes.items():
        (partial / name).write_text(text)
    if lora is None or lora.export_merged:
        write_config(source, partial, dtype)
    finish(source, target)


def _link(file: Path, target: Path) -> None:
    """Make `target` a hard link to `file`, or a copy if the file system has none."""
    try:
        os.link(file, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(file, target)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")
