"""Reads the manifest of a checkpoint `step-<n>/` and verifies the checksums of its files. It does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

LAYOUT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class AdapterNote:
    """A manifest's description of an adapter. The checkpoint does not contain the adapter's base; `base` names its
    weights (`shared.weights.weight_set.Base`)."""

    base: str
    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"an adapter of rank {self.rank} and alpha {self.alpha:g} over the weights {self.base}"


def verify(path: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """Check the size and checksum of every file, or of those in `only`, and return the manifest.

    Raises RpcError(conflict) if the checkpoint is damaged or has a different layout.
    """
    try:
        manifest = json.loads((path / STATE).read_text())
        if manifest["layout"] != LAYOUT:
            raise RpcError(ErrorCode.CONFLICT, f"checkpoint {path}: layout {manifest['layout']} instead of {LAYOUT}")
        expected = {name: (int(row["bytes"]), int(row["xxh3_64"], 16)) for name, row in manifest["files"].items()}
        found = {name: digest(path / name) for name in only or (MODEL, OPTIMIZER, *expected)}
        note_of(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RpcError(
            ErrorCode.CONFLICT, f"checkpoint {path}: damaged ({type(error).__name__}: {error}); use an older one"
        ) from None
    for name in found:
        if found[name] != expected.get(name):
            raise RpcError(
                ErrorCode.CONFLICT, f"checkpoint {path}: {name} is not what was written (checksum); use an older one"
            )
    return dict(manifest)


def note_of(manifest: Mapping[str, Any]) -> AdapterNote | None:
    """Return what a manifest says of an adapter, or None if the checkpoint holds a whole model."""
    noted = manifest.get("adapter")
    return None if noted is None else AdapterNote(str(noted["base"]), int(noted["rank"]), float(noted["alpha"]))


def check_note(path: Path, mine: AdapterNote | None, expected: AdapterNote | None) -> None:
    """Raise RpcError(conflict) if the checkpoint of `mine` cannot continue a run with `expected`."""
    if mine != expected:
        has, needs = (str(note or "all weights of a model") for note in (mine, expected))
        raise RpcError(
            ErrorCode.CONFLICT,
            f"checkpoint {path}: holds {has}, but the run trains {needs}; restore policy.lora and policy.model",
        )


def made_at_stop(path: Path) -> bool:
    """Return whether a checkpoint was saved because the run was stopping. Returns False for a damaged checkpoint."""
    try:
        return bool(json.loads((path / STATE).read_text()).get("at_stop", False))
    except (OSError, ValueError, AttributeError):
        return False


def digest(path: Path) -> tuple[int, int]:
    """Return the size and the xxh3-64 digest of a file."""
    hasher = xxhash.xxh3_64()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return size, hasher.intdigest()
