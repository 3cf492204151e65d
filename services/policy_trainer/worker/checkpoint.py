"""Checkpoints on disk: safetensors and JSON under `step-<n>/`. After a kill, a checkpoint is either complete or absent.

    model.safetensors      weights under their Hugging Face names: those of a version, which may be an adapter's
    optimizer.safetensors  <slot>/<parameter>
    earlier.safetensors    <version>/<parameter> of earlier versions (run.deterministic with a staleness above 0)
    state.json             layout version, step, size and xxh3-64 of these files, and the adapter's rank, alpha and base

Files are written into a temporary folder, synced, read back, verified against their checksums and renamed. No file is a
pickle.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from proto.messages import ErrorCode, TransferParameter
from services.policy_trainer.worker.mesh import from_rank_0
from shared.checkpoint_files import LAYOUT, MODEL, OPTIMIZER, STATE, AdapterNote, digest, note_of, verify
from shared.rpc.errors import RpcError
from shared.rundir import CHECKPOINT_PREFIX, checkpoint_steps
from shared.weights.weight_set import described, room_for

EARLIER = "earlier.safetensors"
_PARTIAL = ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class SavedState:
    """Everything a worker needs to continue after `step` (see `TrainingState`, `EarlierVersions`)."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    earlier: dict[str, Tensor] = field(default_factory=dict)
    at_stop: bool = False
    """Whether the checkpoint was saved because the run was stopping, outside the regular interval."""
    adapter: AdapterNote | None = None
    """The adapter that the weights belong to; None for all weights of a model."""


def _write(partial: Path, state: SavedState) -> None:
    """Write all files of a checkpoint durably and verify them."""
    save_file(state.weights, partial / MODEL, metadata={"format": "pt"})
    save_file(state.optimizer, partial / OPTIMIZER)
    if state.earlier:
        save_file(state.earlier, partial / EARLIER)
    manifest: dict[str, Any] = {"step": state.step, "at_stop": state.at_stop}
    if state.adapter is not None:
        manifest["adapter"] = asdict(state.adapter)
    seal(partial, manifest, (MODEL, OPTIMIZER, *([EARLIER] if state.earlier else [])))
    verify(partial)


def seal(partial: Path, about: dict[str, Any], names: Sequence[str]) -> None:
    """Make the files `names` durable and write a manifest with their checksums, which also says what is in `about`."""
    manifest: dict[str, Any] = {"layout": LAYOUT, **about, "files": {}}
    for name in names:
        os.chmod(partial / name, 0o644)
        _sync(partial / name)
        size, checksum = digest(partial / name)
        manifest["files"][name] = {"bytes": size, "xxh3_64": f"{checksum:016x}"}
    (partial / STATE).write_text(json.dumps(manifest, indent=2) + "\n")
    _sync(partial / STATE)
    _sync(partial)


def save(folder: Path, state: SavedState) -> Path:
    """Write `folder/step-<n>`, replacing any checkpoint of that step.

    Return the path once everything is durable and verified. Raises OSError (disk full).
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    target = folder / f"{CHECKPOINT_PREFIX}{state.step}"
    replace(target, lambda partial: _write(partial, state))
    return target


def replace(target: Path, write: Callable[[Path], None]) -> None:
    """Make `target` the folder that `write` fills, atomically and durably. `write` gets an empty folder.

    Raises the errors of `write` and OSError. A folder that was there stays in that case.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # free the space, which other processes need if the disk is full
        raise
    if target.exists():
        _exchange(partial, target)  # atomic, because the replaced checkpoint may be the only one
    else:
        partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(partial, ignore_errors=True)


def load(folder: Path, step: int) -> SavedState:
    """Return the checkpoint of `step`. Raises RpcError: missing if it does not exist, or conflict if a file differs
    from what was written."""
    path = folder / f"{CHECKPOINT_PREFIX}{step}"
    if not path.is_dir():
        there = ", ".join(map(str, checkpoint_steps(folder))) or "none"
        raise RpcError(ErrorCode.MISSING, f"checkpoint {path}: does not exist; existing checkpoints: {there}")
    manifest = verify(path)
    if manifest.get("step") != step:
        raise RpcError(ErrorCode.CONFLICT, f"checkpoint {path}: {STATE} belongs to step {manifest.get('step')}")
    try:
        earlier = load_file(path / EARLIER) if EARLIER in manifest["files"] else {}
        weights, optimizer = load_file(path / MODEL), load_file(path / OPTIMIZER)
    except (SafetensorError, OSError) as error:
        raise RpcError(ErrorCode.CONFLICT, f"checkpoint {path}: unreadable: {error}") from None
    return SavedState(step, weights, optimizer, earlier, adapter=note_of(manifest))


def broadcast(state: SavedState | None) -> SavedState:
    """Return rank 0's `state`, which the ranks on other hosts cannot read, on every rank. Every rank must call this.

    Other ranks need as much host memory as if they had read the checkpoint themselves.
    """
    step = torch.tensor([0 if state is None else state.step])
    dist.broadcast(step, 0)
    weights = _broadcast_tensors(None if state is None else state.weights)
    optimizer = _broadcast_tensors(None if state is None else state.optimizer)
    earlier = _broadcast_tensors(None if state is None else state.earlier)
    return SavedState(int(step), weights, optimizer, earlier)


def _broadcast_tensors(mine: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    table = from_rank_0(b"" if mine is None else msgspec.msgpack.encode(described(mine)))
    rows = msgspec.msgpack.decode(table, type=list[TransferParameter])
    tensors = dict(mine) if mine is not None else room_for(rows)
    for tensor in tensors.values():
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
    return tensors


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders atomically (Linux renameat2). Raises OSError if the file system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: exchanging with {other}", str(one))


def _sweep(folder: Path) -> None:
    """Remove the hidden folders that remain from a replaced checkpoint or an interrupted save."""
    for leftover in folder.glob(f".{CHECKPOINT_PREFIX}*{_PARTIAL}"):
        shutil.rmtree(leftover)
