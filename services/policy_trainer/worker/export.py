"""Exports the policy as a Hugging Face folder that loads like the original one. Weights are not pickled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from services.policy_trainer.worker.backend import Backend

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5", ".onnx")


def export(backend: Backend, policy_dir: Path, target: Path) -> None:
    """Write model, configuration and the tokenizer files of `policy_dir` and move them to `target`, replacing it.

    Every rank has to call this; rank 0 writes. Raises OSError (no space, no permission).
    """
    partial, replaced = (target.parent / f".{target.name}.{end}" for end in ("partial", "replaced"))
    if backend.place.rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    backend.export(partial)
    if backend.place.rank != 0:
        return
    for source in sorted(policy_dir.iterdir()):
        written = partial / source.name
        if source.is_file() and not written.exists() and not source.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(source, written)
    for path in partial.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which another user's engine cannot read
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
