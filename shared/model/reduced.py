"""Shrinks a model's configuration without changing what the model computes in principle.

Widths are divided by one number, so that relations between them (a hidden size that is heads times head size) still
hold; numbers of heads stay. Windows, chunks and lengths at which a model changes its behaviour become a few tokens. As
few of the first layers are kept as contain every kind of layer. The result is checked by building it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shared.topology.model_files import CHOSEN

VOCABULARY = 192
WINDOW, ORIGINAL, POSITIONS = 8, 16, 64
"""Tokens of a window or chunk, of the length before a change of the rotary embedding, and of the longest sequence."""
MAX_PARAMETERS = 24_000_000
_DIVISORS = (64, 32, 16, 8, 4, 2, 1)
_DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of layers to try."""
_LEAST_HEAD = 8

_WIDTH = re.compile(
    r"hidden_size|intermediate_size|_dim$|_dim_|^dim_|_rank$|d_model|n_embd|n_inner|lru_width|d_state|state_size|d_head"
    r"|headdim|d_ssm|d_inner|^dff$|kv_channels|embedding_size|feed_forward_size|attention_head_size|_hidden_dimension"
)
_HEAD = re.compile(r"head_dim$|^d_head$|^kv_channels$|^qk_|attention_head_size|headdim$")
_NO_WIDTH = re.compile(r"conv|kernel|pos_embds|hidden_size_per_patch")
_WINDOW = re.compile(r"window|chunk_size|chunk_length|^local_attention$|^block_size$|^index_topk$|block_length")
_NO_WINDOW = re.compile(r"max_window_layers|pattern|_layers|conf_")
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|num_position_embeddings|"
    r"max_target_positions|max_sequence_length|max_seq_length)$"
)
_ORIGINAL = re.compile(r"original_max_position_embeddings|floor_scale")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_TOKENS = re.compile(r"(_token_id|_token_index|_index)$")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_IGNORED = re.compile(r"(^|_)(idx|index|id)$|number|layers$")


class Cannot(Exception):
    """A configuration cannot be reduced. The message says why, in one line."""


class Reduced(NamedTuple):
    """A configuration with the number of its parameters and layers."""

    config: Any
    parameters: int
    layers: int


def reductions(config: Any, longest: int | None = None) -> Iterator[Reduced | Cannot]:
    """Yield configurations of the same type as `config`, of which models with at most MAX_PARAMETERS can be built, the
    smallest first, and the reason for each attempt that failed.

    No sequence has more than `longest` tokens; greater lengths at which a model changes stay out of reach.
    """
    for divisor in _DIVISORS:
        try:
            document = config.to_dict()
            if divisor == 1 or _leaves_heads(document, divisor):
                yield _shallow(type(config), _shrunk(document, divisor, longest))
        except Cannot as error:
            yield error
        except Exception as error:  # A library's configuration or model may raise anything.
            yield Cannot(described(error))


def described(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:150]}"


def _leaves_heads(document: Mapping[str, Any], divisor: int) -> bool:
    """Return whether heads that are divided by `divisor` still have an even number of dimensions, 4 or more."""
    dims = [value for name, value in _leaves(document) if _HEAD.search(name)]
    if not dims:
        hidden, heads = _first(document, _HIDDEN), _first(document, _HEADS)
        dims = [hidden // heads] if hidden and heads else []
    return all(dim % (2 * divisor) == 0 and dim >= 4 * divisor for dim in dims if dim >= _LEAST_HEAD)


def _first(document: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((document[name] for name in names if isinstance(document.get(name), int)), 0)


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _shrunk(document: Mapping[str, Any], divisor: int, longest: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in document.items():
        made[name] = _value(name, value, divisor, longest)
    _shrink_experts(made)
    rope = made.get("rope_parameters") or {}
    kinds = [section.get("rope_type") for section in (rope, *rope.values()) if isinstance(section, dict)]
    if "dynamic" in kinds and "max_position_embeddings" in made:
        made["max_position_embeddings"] = _reached(document["max_position_embeddings"], ORIGINAL, longest)
    return made


def _reached(value: int, reduced: int, longest: int | None) -> int:
    """Return a length beyond which a model changes, reduced, or POSITIONS if no sequence is longer than it."""
    return min(value, reduced) if longest is None or longest > value else POSITIONS


def _value(name: str, value: Any, divisor: int, longest: int | None) -> Any:
    if isinstance(value, dict):
        return _shrunk(value, divisor, longest) if name not in ("id2label", "label2id") else value
    if name in ("short_factor", "long_factor"):
        return value[::divisor] if isinstance(value, list) else value
    if name.endswith("mrope_section") and isinstance(value, list):
        return [width // divisor for width in value]
    if isinstance(value, list) and _WIDTH.search(name) and all(isinstance(width, int) for width in value):
        return [max(1, width // divisor) for width in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _TOKENS.search(name):
        return min(value, VOCABULARY - 1)
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if _ORIGINAL.search(name):
        return _reached(value, ORIGINAL, longest)
    if _POSITIONS.search(name):
        return min(value, POSITIONS)
    if _WINDOW.search(name) and not _NO_WINDOW.search(name):
        return _reached(value, WINDOW, longest)
    if _WIDTH.search(name) and not _NO_WIDTH.search(name):
        return math.ceil(value / divisor)
    return value


def _shrink_experts(document: dict[str, Any]) -> None:
    """Leave a few experts: more than one per group, and more than a token uses."""
    if isinstance(document.get("zero_expert_num"), int):
        document["zero_expert_num"] = min(document["zero_expert_num"], 4)
    name = next((key for key in _EXPERTS if isinstance(document.get(key), int)), None)
    if name is None:
        return
    chosen = max((document[key] for key in CHOSEN if isinstance(document.get(key), int)), default=1)
    groups = document.get("n_group") or 1
    wanted = groups * max(2, math.ceil((chosen + 2) / groups))
    if wanted < document[name]:
        document[name] = wanted


def _shallow(kind: Any, document: dict[str, Any]) -> Reduced:
    """Return `document` with as few layers as contain every kind of layer, or with all of them."""
    whole = kind.from_dict(deepcopy(document))
    model = on_meta(whole)
    kinds = _kinds(model)
    for layers in (depth for depth in _DEPTHS if depth < len(kinds)):
        # Fewer layers may contradict the rest of the configuration.
        with contextlib.suppress(Exception):
            config = kind.from_dict(_cut(document, len(kinds), layers))
            cut = on_meta(config)
            if set(_kinds(cut)) == set(kinds) and _size(cut) <= MAX_PARAMETERS:
                return Reduced(config, _size(cut), layers)
    if _size(model) > MAX_PARAMETERS:
        raise Cannot(f"a model with all kinds of its layers has {_size(model):,} parameters, limit {MAX_PARAMETERS:,}")
    return Reduced(whole, _size(model), len(kinds))


def _kinds(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return the kinds of the model's layers in order."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [_kind(block) for block in max(stacks, key=len, default=[])]


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _cut(document: Mapping[str, Any], layers: int, least: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            made[name] = _cut(value, layers, least)
        elif name in _DEPTH_NAMES and value == layers:
            made[name] = least
        elif isinstance(value, list) and len(value) == layers:
            made[name] = value[:least]
        else:
            made[name] = value
    return made


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes a layer: its modules, the shapes of their parameters, and their plain settings."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        settings = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | str) and not key.startswith("_") and not _IGNORED.search(key)
        )
        shapes = [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, tuple(map(str, settings)), tuple(shapes)))
    return tuple(parts)


def on_meta(config: Any) -> nn.Module:
    """Build the model without memory for its parameters."""
    with torch.device("meta"):
        return cast(nn.Module, cast(Any, AutoModelForCausalLM).from_config(deepcopy(config)))
