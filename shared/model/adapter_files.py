"""Reads and writes adapters in the format of the library peft, and merges them into the weights of their base. It does
not import torch.

    adapter_config.json        the base, the rank, alpha and the adapted modules
    adapter_model.safetensors  base_model.model.<module>.lora_A.weight [rank, in], and the same with lora_B [out, rank]

In files, and in every mapping here, B is without its scale alpha / rank, by which peft multiplies it. Mappings of
tensors name them as a version does: `<module>.lora_A`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from proto import dtypes
from proto.tensors import Array
from shared import safetensors_file
from shared.rpc.errors import BadInput
from shared.safetensors_file import CODES, Entry
from shared.topology import hub, model_files
from shared.topology.lora import CONFIG, FOLDER, TENSORS, Lora, differences
from shared.topology.model_files import Stored

A, B = "lora_A", "lora_B"
_BEFORE, _AFTER = "base_model.model.", ".weight"
_FLOATS = {code: name for name, code in CODES.items()}


def export(folder: Path, source: Path, lora: Lora, dtype: str, tensors: Mapping[str, Array]) -> None:
    """Write the adapter `tensors` into a new subfolder of `folder`, and, if `lora` asks for it, the weights of its base
    in the folder `source`, into which it is merged, with data type `dtype`. Raises the errors of `merge`."""
    write(folder / FOLDER, source, lora.rank, lora.alpha, tensors)
    if lora.export_merged:
        merge(source, folder, lora.scale, dtype, tensors)


# ---------------------------------------------------------------------------------------------- peft's format


def write(folder: Path, source: Path, rank: int, alpha: float, tensors: Mapping[str, Array]) -> None:
    """Write an adapter over the model in the folder `source` into `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = hub.model_name(str(source))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source) if name is None else name.name,
        "revision": None if name is None else name.revision,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": _targets(modules_of(tensors), source),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {f"{_BEFORE}{name}{_AFTER}": np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(named, folder / TENSORS, metadata={"format": "pt"})


def modules_of(names: Collection[str]) -> list[str]:
    """Return the modules to which tensors of these names belong, sorted."""
    return sorted({name.rpartition(".")[0] for name in names})


def _targets(modules: Collection[str], source: Path) -> list[str]:
    """Return names by which peft finds exactly these modules: the last parts of their names if no other module in
    the files of the base ends like that, or else the whole names."""
    ends = Counter(module.rpartition(".")[2] for module in modules)
    others = {name.rpartition(".")[0] for name in model_files.stored_tensors(str(source))}
    alike = Counter(end for name in others if (end := name.rpartition(".")[2]) in ends)
    return sorted(ends) if alike <= ends else sorted(modules)


def read(folder: Path, lora: Lora, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Return the tensors of the adapter in `folder`. `shapes` are those of the weights [out, in] of the modules that
    have an adapter.

    Raises BadInput unless the adapter has the rank and alpha of `lora`, fits these modules, and has no other.
    """
    where, rank = f"policy.lora.adapter_path: {folder}", lora.rank
    try:
        differ = differences(lora, str(folder))
        stored = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(f"{where}: {' '.join(str(error).split())[:300]}") from None
    for key, text in differ.items():
        raise BadInput(f"policy.lora.{key}: {text}; use that, or another adapter_path")
    tensors = {name.removeprefix(_BEFORE).removesuffix(_AFTER): array for name, array in stored.items()}
    expected = {f"{module}.{A}": (rank, shape[1]) for module, shape in shapes.items()}
    expected |= {f"{module}.{B}": (shape[0], rank) for module, shape in shapes.items()}
    for names, what in (
        (expected.keys() - tensors.keys(), "which policy.lora.target_modules chooses, is missing"),
        (tensors.keys() - expected.keys(), "which policy.lora.target_modules leaves out, is there"),
    ):
        if names:
            raise BadInput(f"{where}: {min(names)}, {what}; correct target_modules or exclude_modules")
    for name in sorted(expected):
        if tensors[name].shape != expected[name]:
            shown = f"{name} is {list(tensors[name].shape)}, but must be {list(expected[name])}"
            raise BadInput(f"{where}: belongs to another base: {shown}")
    return tensors


# ---------------------------------------------------------------------------------------------- merging


def check_merge(source: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the name that the weight of each adapted module has in the files of the base in the folder `source`, by
    the module. `shapes` are those of the weights.

    Files may have a prefix less or more than the model, such as `model.`. Raises BadInput if a weight is not there.
    """
    stored, places = model_files.stored_tensors(str(source)), dict[str, str]()
    for module, shape in shapes.items():
        name = f"{module}{_AFTER}"
        alike = [other for other in stored if f".{name}".endswith(f".{other}") or other.endswith(f".{name}")]
        fit = [name] if name in stored else alike
        if len(fit) != 1 or stored[fit[0]].shape != tuple(shape) or stored[fit[0]].dtype not in _FLOATS:
            raise BadInput(
                f"policy.lora: an adapter cannot be merged into {name}, because the files of {source} have no such "
                f"matrix {list(shape)}; set policy.lora.export_merged: false"
            )
        places[module] = fit[0]
    return places


def merge(source: Path, folder: Path, scale: float, dtype: str, tensors: Mapping[str, Array]) -> None:
    """Write the weights of the model in the folder `source` into `folder`, as `dtype`, with an adapter merged into
    them: W + s B A in float32, rounded once. W and the product s B are those with which the policy computes.

    The files have the names of the source's. One tensor is in memory at a time. Raises OSError, ValueError, and the
    errors of `check_merge`.
    """
    stored, out = model_files.stored_tensors(str(source)), dtypes.by_name(dtype).numpy
    modules = modules_of(tensors)
    shapes = {name: (len(tensors[f"{name}.{B}"]), tensors[f"{name}.{A}"].shape[1]) for name in modules}
    adapted = {name: module for module, name in check_merge(source, shapes).items()}

    def merged(name: str) -> Array:
        values = _values(stored[name])
        if stored[name].dtype not in _FLOATS:
            return values
        values = values.astype(out)
        if name not in adapted:
            return values
        a, b = (tensors[f"{adapted[name]}.{part}"] for part in (A, B))
        scaled = (b.astype(np.float32) * np.float32(scale)).astype(b.dtype)
        wide: Array = values.astype(np.float32) + scaled.astype(np.float32) @ a.astype(np.float32)
        return wide.astype(out)

    total, files = 0, sorted({tensor.file for tensor in stored.values()})
    for file in files:
        own = {name: tensor for name, tensor in stored.items() if tensor.file == file}
        total += _write_tensors(folder / file.name, own, dtype, merged)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: tensor.file.name for name, tensor in stored.items()},
        }
        (folder / model_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_tensors(file: Path, stored: Mapping[str, Stored], dtype: str, values: Callable[[str], Array]) -> int:
    """Write the `values` of tensors into a safetensors file, one after another: those that are `stored` as floating
    point numbers as `dtype`, the others as they are. Return the number of their bytes."""

    def width(name: str) -> int:
        tensor = stored[name]
        if tensor.dtype in _FLOATS:
            return dtypes.by_name(dtype).itemsize
        return (tensor.end - tensor.start) // max(1, math.prod(tensor.shape))

    # The widest come first, so that every tensor is aligned to its elements.
    entries = {
        name: Entry(
            CODES[dtype] if stored[name].dtype in _FLOATS else stored[name].dtype,
            stored[name].shape,
            math.prod(stored[name].shape) * width(name),
        )
        for name in sorted(stored, key=width, reverse=True)
    }
    with file.open("wb") as stream:
        return safetensors_file.write(
            stream, entries, lambda name: np.ascontiguousarray(values(name)).reshape(-1).view(np.uint8).data
        )


def _values(tensor: Stored) -> Array:
    """Return a stored tensor as a read-only mapping of its file: in its shape if it consists of floating point numbers,
    or else as bytes."""
    if not tensor.end - tensor.start:
        return np.empty(tensor.shape, np.uint8)
    if tensor.dtype not in _FLOATS:
        return np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.end - tensor.start,))
    return np.memmap(tensor.file, dtypes.by_name(_FLOATS[tensor.dtype]).numpy, "r", tensor.start, tensor.shape)
