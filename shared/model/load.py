"""Loads a causal language model, or a value model made of one, from a local folder, names its weights, remembers which
passes may compute its outputs (`shared.topology.passes`), and makes torch deterministic.

Nothing is downloaded or unpickled, and no code from the model folder is run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from shared.model.linear import accelerate
from shared.model.value_head import BIAS, WEIGHT, replace_output_layer, stored_head
from shared.rpc.errors import BadInput, RpcError
from shared.topology import tied_weights
from shared.topology.models import Head
from shared.topology.passes import Passes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_PLAIN = Passes()


def load_model(path: str | Path, dtype: str, head: Head = "language") -> nn.Module:
    """Load the model in `path` with weights of `dtype` (`float32`, `bfloat16`, ...), in eval mode, on the CPU.

    A value model (`head`) has the `score.weight` of the folder, or zeros, in place of its output layer, which the
    folder need not contain. The same folder always yields bit-identical weights. Parameters require gradients. Raises a
    one-line BadInput if the folder, its configuration or its weights cannot be used, if weights are missing, if the
    configuration ties weights that differ, or if a value head cannot represent the folder's (`stored_head`).
    """
    folder = Path(path)
    _check(folder, dtype)
    cast(Any, transformers_logging).disable_progress_bar()
    with _refusals(folder), _without_report(head):
        model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=_DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        missing = sorted(info["missing_keys"])
        if head == "value":
            score = replace_output_layer(model)
            score.weight.data.copy_(stored_head(folder, tuple(score.weight.shape)))
            missing = [name for name in missing if name in model.state_dict()]
            unused = sorted(set(info["unexpected_keys"]) - {WEIGHT, BIAS})
            if unused:
                logging.getLogger(__name__).warning("model %s: weights without use: %s", folder, ", ".join(unused[:3]))
        if missing or info["mismatched_keys"]:
            names = ", ".join([*missing, *map(str, info["mismatched_keys"])][:3])
            raise BadInput(
                f"model {folder}: weights are missing or have the wrong shape: {names}; save the model again"
            )
        # transformers leaves tied weights apart if they differ in the files. Engines tie them all the same.
        for copy, original in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if model.get_parameter_or_buffer(copy) is not model.get_parameter_or_buffer(original):
                raise BadInput(f"model {folder}: {tied_weights.difference(copy, original)}")
        return _prepared(model)


def load_shapes(path: str | Path, dtype: str, head: Head = "language") -> nn.Module:
    """Return the same model as `load_model`, but with uninitialized weights and buffers, which take up no memory until
    they are written. Raises the errors of `empty_model`."""
    folder = Path(path)
    model = empty_model(folder, dtype, head)
    with _refusals(folder):
        return allocated(model)


def empty_model(path: str | Path, dtype: str, head: Head = "language") -> nn.Module:
    """Return the model that the configuration in `path` describes, on the meta device: without memory for weights.

    Raises a one-line BadInput if there is no such model.
    """
    folder = Path(path)
    _check(folder, dtype)
    config = read_config(folder)
    with _refusals(folder), torch.device("meta"):
        model = cast(nn.Module, cast(Any, AutoModelForCausalLM).from_config(config, dtype=_DTYPES[dtype]))
        if head == "value":
            replace_output_layer(model)
        return model


def read_config(folder: Path) -> Any:
    """Return the Hugging Face configuration in `folder`. Raises a one-line BadInput."""
    with _refusals(folder):
        return cast(Any, AutoConfig).from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Turn every error of transformers about the model in `folder` into a one-line BadInput.

    For a model that it cannot build, transformers raises whatever its code happens to meet (TypeError, AttributeError,
    ImportError, ...).
    """
    try:
        yield
    except RpcError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"model {folder}: cannot be loaded: {reason[:300]}") from error


@contextmanager
def _without_report(head: Head) -> Iterator[None]:
    """Silence the report of transformers about a value model: it expects the output layer, and no value head."""
    verbosity = cast(Any, transformers_logging).get_verbosity()
    if head == "value":
        cast(Any, transformers_logging).set_verbosity_error()
    try:
        yield
    finally:
        cast(Any, transformers_logging).set_verbosity(verbosity)


def allocated(model: Any) -> nn.Module:
    """Move `model` from the meta device to uninitialized memory on the CPU, and return it."""
    with unfilled():
        model.to_empty(device="cpu")
    model.tie_weights()
    return _prepared(model)


def _check(folder: Path, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise BadInput(f"dtype {dtype!r}: use one of {', '.join(_DTYPES)}")
    if not (folder / "config.json").is_file():
        raise BadInput(f"model {folder}: no config.json there; give a Hugging Face model folder")


def _prepared(model: Any) -> nn.Module:
    # With a padding index, the embedding row at that index would get no gradient, even where its token was sampled or
    # is part of the prompt.
    model.get_input_embeddings().padding_idx = None
    accelerate(model)
    return cast(nn.Module, model.eval())


@contextmanager
def unfilled() -> Iterator[None]:
    """Leave new memory uninitialized, even in deterministic mode. Use this for memory that is written before it is
    read."""
    deterministic: Any = torch.utils.deterministic
    fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fills


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose classes the model declares unsplittable, such as its decoder layers, or an empty list if
    it declares none."""
    names = set(cast(Any, model)._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by Hugging Face name, detached, not copied. A tied weight appears once, under its first name.

    Persistent buffers count as weights, because without them the model would be a different one.
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


def mismatched_weights(mine: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of weights that are missing from one mapping or differ in shape, as they do if the models
    differ."""
    reshaped = [name for name in sorted(mine.keys() & given.keys()) if tuple(mine[name]) != tuple(given[name])]
    return sorted(mine.keys() ^ given.keys()) + reshaped


def weight_holders(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the parameters or buffers that hold each weight of `named_weights`. A tied weight has several holders.

    To move a weight to different memory (`holder.data = tensor`), assign to all its holders; otherwise, they would
    differ.
    """
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    holders: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        first = names.setdefault(place, name) if tensor.numel() else name
        tensors = holders.setdefault(first, [])
        if not any(tensor is other for other in tensors):
            tensors.append(tensor)
    return holders


def allow(model: nn.Module, passes: Passes | None) -> None:
    """Let `passes` compute the outputs of `model`; None: only those that assume nothing about it."""
    cast(Any, model).allowed_passes = passes or _PLAIN


def passes_of(model: nn.Module) -> Passes:
    """Return the passes that may compute the outputs of `model`."""
    return cast(Passes, getattr(model, "allowed_passes", _PLAIN))


def require_deterministic_algorithms() -> None:
    """Make operations without a deterministic implementation raise an error in this process. Call it before the first
    kernel.

    Source: torch's notes on reproducibility. cuBLAS requires its workspace to be fixed before its first use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
