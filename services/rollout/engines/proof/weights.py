"""Checks the weights that an engine is given, and hands them to the engine's own processes. This module loads no
weights."""

from __future__ import annotations

import math
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
from services.rollout.engines.proof.load_trace import Proof, WeightPart
from shared import safetensors_file
from shared.safetensors_file import Entry
from shared.tensors_torch import to_torch
from shared.weights.weight_set import WeightSet, shown


def expected_weights(path: Path, dtype: str) -> WeightSet:
    """Return the weights of type `dtype` in a model directory, without allocating them."""
    from shared.model.load import empty_model

    model = empty_model(path, dtype)
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return WeightSet.of(dict(tensors.values()))


def base_digests(base: WeightSet, announced: Sequence[int]) -> dict[str, int]:
    """Return by name the digests that were `announced` for `base` in the order of the sorted names.

    Raises WeightsMismatch if their number differs.
    """
    if len(base.names) != len(announced):
        raise WeightsMismatch(f"{len(announced)} digests announced for {len(base.names)} parameters")
    return dict(zip(sorted(base.names), announced, strict=True))


def fitting(expected: WeightSet, weights: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return `weights` as tensors that share their memory, in the order of `expected`.

    Raises WeightsMismatch if a name, a type or a shape differs.
    """
    check_fits(expected, WeightSet.of(weights))
    return {name: to_torch(weights[name]) for name in expected.names}


def check_fits(expected: WeightSet, given: WeightSet) -> None:
    """Raise WeightsMismatch if a name, a type or a shape of the `given` weights differs from the engine's."""
    try:
        expected.check_fits(given)
    except ValueError as error:
        raise WeightsMismatch(str(error)) from None


def check_proofs(proofs: Sequence[Proof], expected: WeightSet, digests: Mapping[str, int]) -> None:
    """Check against `digests` (by name) that an engine's ranks hold all `expected` weights, bit for bit.

    Ranks may hold the same part (replicated heads, a tied head), but then its contents must be identical on all of
    them. Raises WeightsMismatch.
    """
    faults = sorted({fault for proof in proofs for fault in proof.faults})
    parts_of: dict[str, dict[WeightPart, int]] = {name: {} for name in expected.names}
    wrong = parts_of.keys() ^ digests.keys()
    for part, digest in (pair for proof in proofs for pair in proof.parts):
        if parts_of.setdefault(part.name, {}).setdefault(part, digest) != digest:
            wrong.add(part.name)
    for parameter in expected.parameters:
        parts = parts_of[parameter.name]
        elements = sum(part.rows * part.columns for part in parts)
        if elements != math.prod(parameter.shape) or sum(parts.values()) % (1 << 64) != digests.get(parameter.name):
            wrong.add(parameter.name)
    problems = [shown(faults)] if faults else []
    if wrong:
        problems.append(
            f"{len(wrong)} of {len(expected.parameters)} parameters have wrong bits: {shown(sorted(wrong))}"
        )
    if problems:
        raise WeightsMismatch("; ".join(problems))


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
    codes = {name: safetensors_file.CODES[str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
    entries = {name: Entry(codes[name], tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
    safetensors_file.write(
        file, entries, lambda name: tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
    )
