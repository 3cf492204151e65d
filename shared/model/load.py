"""Loads a causal language model from a local folder, and names its weights. Must never download, unpickle or run code
that came with the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_model(path: str | Path, dtype: str) -> nn.Module:
    """The model of the folder `path` with weights of `dtype` (`float32`, `bfloat16`, ...), in eval mode, on the CPU.

    Deterministic: the same folder gives the same bits. Parameters require gradients. Raises RpcError(bad_request) in
    one line when the folder, its configuration or its weights cannot be used, or weights are missing from it.
    """
    folder = Path(path)
    if dtype not in _DTYPES:
        raise RpcError(ErrorCode.BAD_REQUEST, f"dtype {dtype!r}: use one of {', '.join(_DTYPES)}")
    if not (folder / "config.json").is_file():
        raise RpcError(ErrorCode.BAD_REQUEST, f"model {folder}: no config.json there; give a Hugging Face model folder")
    cast(Any, logging).disable_progress_bar()
    try:
        model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=_DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RpcError(ErrorCode.BAD_REQUEST, f"model {folder}: cannot be loaded: {first[:300]}") from None
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        names = ", ".join([*missing, *map(str, info["mismatched_keys"])][:3])
        raise RpcError(
            ErrorCode.BAD_REQUEST, f"model {folder}: weights missing or of another shape: {names}; save the model again"
        )
    # a padding index keeps its row of the embedding without a gradient, also where that token was sampled or given
    model.get_input_embeddings().padding_idx = None
    return cast(nn.Module, model.eval())


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, detached, no copy; a tied weight once, under its first name.

    Persistent buffers count as weights: a loader that skips them loads another model.
    """
    weights: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        weights[name] = tensor.detach()
    return weights


def weight_holders(model: nn.Module) -> dict[str, list[Tensor]]:
    """Under each name of `named_weights` the model's own parameters or buffers with that weight: several when tied.

    Whoever gives the weight other memory (`holder.data = tensor`) must do so for all of them, or they come apart.
    """
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    holders: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        first = names.setdefault(place, name) if tensor.numel() else name
        known = holders.setdefault(first, [])
        if not any(tensor is each for each in known):
            known.append(tensor)
    return holders
