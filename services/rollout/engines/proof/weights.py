"""Checks the weights that an engine is given, and hands them to the engine's own processes. This module loads no
weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from proto.tensors import Array
from services.rollout.engine import WeightsMismatch
from services.rollout.engines.proof.load_trace import Part, Proof
from shared.tensors_torch import to_torch

Expected = dict[str, tuple[torch.dtype, torch.Size]]
"""Type and shape of every weight by name. A tied weight occurs once, under its first name."""
_NAMED = 4  # maximum number of names in an error
_ALIGNMENT = 8
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def expected_weights(path: Path, dtype: str) -> Expected:
    """Return the type (`dtype`) and shape of every weight in a model directory, without allocating the weights."""
    from shared.model.load import empty_model

    model = empty_model(path, dtype)
    expected: Expected = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            expected[name] = (value.dtype, value.shape)
    return expected


def fitting(expected: Expected, weights: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return `weights` as tensors that share their memory, in the order of `expected`.

    Raises WeightsMismatch if a name, a type or a shape differs.
    """
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected)
    if missing or unexpected:
        raise WeightsMismatch(
            f"{len(weights)} parameters given for the engine's {len(expected)}: missing {shown(missing)}, "
            f"unexpected {shown(unexpected)}; is policy.model the one being trained?"
        )
    tensors = {name: to_torch(weights[name]) for name in expected}
    for name, (dtype, shape) in expected.items():
        if tensors[name].dtype != dtype or tensors[name].shape != shape:
            raise WeightsMismatch(
                f"parameter {name}: {tensors[name].dtype} {list(tensors[name].shape)} given, but the engine's model "
                f"has {dtype} {list(shape)}; is policy.model the one being trained?"
            )
    return tensors


def check_proofs(proofs: Sequence[Proof], expected: Expected, digests: Mapping[str, int]) -> None:
    """Check against `digests` (by name) that an engine's ranks hold all `expected` weights, bit for bit.

    Ranks may hold the same part (replicated heads, a tied head), but then its contents must be identical on all of
    them. Raises WeightsMismatch.
    """
    faults = sorted({fault for proof in proofs for fault in proof.faults})
    held: dict[str, dict[Part, int]] = {name: {} for name in expected}
    wrong = set(expected.keys() ^ digests.keys())
    for part, digest in (each for proof in proofs for each in proof.parts):
        if held.setdefault(part.name, {}).setdefault(part, digest) != digest:
            wrong.add(part.name)
    for name, (_, shape) in expected.items():
        elements = sum(part.rows * part.columns for part in held[name])
        if elements != shape.numel() or sum(held[name].values()) % (1 << 64) != digests.get(name):
            wrong.add(name)
    found = [shown(faults)] if faults else []
    if wrong:
        found.append(f"{len(wrong)} of {len(expected)} parameters have wrong bits: {shown(sorted(wrong))}")
    if found:
        raise WeightsMismatch("; ".join(found))


@contextmanager
def memory_file(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Write `tensors` to a safetensors file in memory, for this user's processes on this machine, and yield its path.

    The file has no name in any folder. It disappears once this context or the process has ended, however that happens,
    and the last mapping is gone.
    """
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        _write_safetensors(file, tensors)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


@contextmanager
def folder_file(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[str]:
    """Write `tensors` to a safetensors file in `folder`, which another machine or user can read, and yield its path.

    If this process is killed, the file remains.
    """
    with tempfile.NamedTemporaryFile(prefix="policy-", suffix=".safetensors", dir=folder) as file:
        os.fchmod(file.fileno(), 0o644)
        _write_safetensors(file, tensors)
        yield file.name


def _write_safetensors(file: IO[bytes], tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file.flush()


def shown(names: list[str]) -> str:
    """Return the first few names and the number of the others."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + rest
