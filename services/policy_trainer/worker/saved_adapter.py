"""Saves a client's model in a folder, in the format of the library peft, so that other programs can load the adapter.

    adapter_config.json, adapter_model.safetensors    the adapter, without padding (`shared.model.adapter_files`)
    optimizer.safetensors                             <slot>/<tensor> of the moments and masters, if they are saved
    state.json                                        the adapter, its base, its step, and the checksums of the files

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
from shared.checkpoint_files import OPTIMIZER, STATE, verify
from shared.model import adapter_files
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy
from shared.topology.lora import CONFIG, TENSORS

_BEFORE, _AFTER = "base_model.model.", ".weight"


def save(
    folder: Path, source: Path, base: str, step: int, spec: AdapterSpec, state: TrainingState, *, with_optimizer: bool
) -> Path:
    """Write the `state` of an adapter over the model in the folder `source`, whose weights are called `base`.

    Return `folder` once it is durable and verified. Raises OSError (disk full).
    """
    about = {"step": step, "adapter": {"base": base, **msgspec.to_builtins(spec), "groups": sorted(spec.groups)}}
    names = (CONFIG, TENSORS, *([OPTIMIZER] if with_optimizer else []))

    def write(partial: Path) -> None:
        tensors = {name: to_numpy(tensor) for name, tensor in state.weights.items()}
        adapter_files.write(partial, source, spec.rank, spec.alpha, tensors)
        if with_optimizer:
            save_file(state.optimizer, partial / OPTIMIZER)
        checkpoint.seal(partial, about, names)
        verify(partial, names)

    checkpoint.replace(folder, write)
    return folder


def load(folder: Path, spec: AdapterSpec, base: str, *, with_optimizer: bool) -> TrainingState:
    """Return what `save` has written. `base` is "" on a rank that does not know it.

    Raises RpcError: missing if there is no such folder or no moments in it, conflict if a file is damaged or the
    adapter is another one than `spec`, whose seed does not matter, or has another base.
    """
    if not (folder / STATE).is_file():
        raise RpcError(ErrorCode.MISSING, f"{folder}: no saved adapter is there")
    if with_optimizer and not (folder / OPTIMIZER).is_file():
        raise RpcError(ErrorCode.MISSING, f"{folder}: saved without optimizer state; load the weights alone")
    names = (CONFIG, TENSORS, *([OPTIMIZER] if with_optimizer else []))
    manifest = verify(folder, names)
    noted: dict[str, Any] = manifest["adapter"]
    mine = {name: noted.get(name) for name in ("base", "rank", "alpha", "groups")}
    wanted = {"base": base or noted["base"], "rank": spec.rank, "alpha": spec.alpha, "groups": sorted(spec.groups)}
    for name in wanted:
        if mine[name] != wanted[name]:
            text = f"{folder}: its adapter has {name} {mine[name]}, but the model has {wanted[name]}"
            raise RpcError(ErrorCode.CONFLICT, f"{text}; load it into a model like that")
    try:
        stored = load_file(folder / TENSORS)
        optimizer: dict[str, Tensor] = load_file(folder / OPTIMIZER) if with_optimizer else {}
    except (SafetensorError, OSError) as error:
        raise RpcError(ErrorCode.CONFLICT, f"{folder}: unreadable: {error}") from None
    weights = {name.removeprefix(_BEFORE).removesuffix(_AFTER): tensor for name, tensor in stored.items()}
    return TrainingState(weights, optimizer)
