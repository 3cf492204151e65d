"""Saves a client's model in a folder from which other programs can load it.

    adapter_config.json, adapter_model.safetensors    an adapter, without padding, in the format of the library peft
    model.safetensors, config.json and others         all weights, in the format of transformers, if they are trained
    optimizer.safetensors                             <slot>/<tensor> of the moments and masters, if they are saved
    state.json                                        the adapter, its base, the step, and the checksums of the files

After a kill, a folder is either complete or absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from proto.messages import AdapterSpec, ErrorCode
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.training_state import TrainingState
from shared import model_folder
from shared.checkpoint_files import MODEL, OPTIMIZER, STATE, verify
from shared.model import adapter_files
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy
from shared.topology.lora import CONFIG, TENSORS

_BEFORE, _AFTER = "base_model.model.", ".weight"


def save(
    folder: Path,
    source: Path,
    dtype: str,
    base: str,
    step: int,
    spec: AdapterSpec,
    state: TrainingState,
    *,
    with_optimizer: bool,
) -> Path:
    """Write the `state` of the model in the folder `source`, or of an adapter over it, whose weights are called `base`.

    Return `folder` once it is durable and verified. Raises OSError (disk full).
    """
    about = {"step": step, "adapter": {"base": base, **msgspec.to_builtins(spec), "groups": sorted(spec.groups)}}
    names = _files(spec, with_optimizer=with_optimizer)

    def write(partial: Path) -> None:
        if spec.rank:
            tensors = {name: to_numpy(tensor) for name, tensor in state.weights.items()}
            adapter_files.write(partial, source, spec.rank, spec.alpha, tensors)
        else:
            save_file(state.weights, partial / MODEL, metadata={"format": "pt"})
            model_folder.write_config(source, partial, dtype)
            model_folder.complete(source, partial)
        if with_optimizer:
            save_file(state.optimizer, partial / OPTIMIZER)
        checkpoint.seal(partial, about, sorted(file.name for file in partial.iterdir()))
        verify(partial, names)

    checkpoint.replace(folder, write)
    return folder


def load(folder: Path, spec: AdapterSpec, base: str, *, with_optimizer: bool) -> TrainingState:
    """Return what `save` has written. `base` is "" on a rank that does not know it.

    Raises RpcError: missing if there is no such folder or no moments in it, conflict if a file is damaged or the
    adapter is another one than `spec`, whose seed does not matter, or has another base.
    """
    if not (folder / STATE).is_file():
        raise RpcError(ErrorCode.MISSING, f"{folder}: no saved model is there")
    if with_optimizer and not (folder / OPTIMIZER).is_file():
        raise RpcError(ErrorCode.MISSING, f"{folder}: saved without optimizer state; load the weights alone")
    names = _files(spec, with_optimizer=with_optimizer)
    manifest = verify(folder, names)
    noted: dict[str, Any] = manifest["adapter"]
    mine = {name: noted.get(name) for name in ("base", "rank", "alpha", "groups")}
    wanted = {"base": base or noted["base"], "rank": spec.rank, "alpha": spec.alpha, "groups": sorted(spec.groups)}
    for name in wanted:
        if mine[name] != wanted[name]:
            text = f"{folder}: its adapter has {name} {mine[name]}, but the model has {wanted[name]}"
            raise RpcError(ErrorCode.CONFLICT, f"{text}; load it into a model like that")
    try:
        stored = load_file(folder / names[0])
        optimizer: dict[str, Tensor] = load_file(folder / OPTIMIZER) if with_optimizer else {}
    except (SafetensorError, OSError) as error:
        raise RpcError(ErrorCode.CONFLICT, f"{folder}: unreadable: {error}") from None
    if spec.rank:
        stored = {name.removeprefix(_BEFORE).removesuffix(_AFTER): tensor for name, tensor in stored.items()}
    return TrainingState(stored, optimizer)


def _files(spec: AdapterSpec, *, with_optimizer: bool) -> list[str]:
    """Return the names of the files that are verified, that of the weights first."""
    return [*([TENSORS, CONFIG] if spec.rank else [MODEL]), *([OPTIMIZER] if with_optimizer else [])]
