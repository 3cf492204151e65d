"""Runs the repeated blocks (decoder layers) of a Hugging Face model again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from shared.model import attention
from shared.model.load import blocks_of
from shared.model.routing import resuming

_ATTENTION = ("flash", "efficient", "cudnn")
_COSTLY = frozenset(
    [
        *("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "torch_attn::_varlen_attn"),
        *(f"aten::_scaled_dot_product_{kernel}_attention" for kernel in _ATTENTION),
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_efficient_attention_forward",
    ]
)
"""Operations whose results are kept with `selective`: matrix products of linear layers, and attention. The products of
an attention without a fused kernel are not among them, because their results are as large as a mask."""


def recompute_blocks(model: nn.Module, what: Literal["layers", "selective"]) -> None:
    """Keep only each block's input for the backward pass, which runs the block again (activation checkpointing).

    With `selective`, the results of costly operations are also kept, and the backward pass runs only the rest. Blocks
    keep their names and places, so weights are found as before. Raises ValueError if there are no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks, so the recompute of its service must be none")
    for block in blocks:
        contexts = noop_context_fn
        if what == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _keeps)
        block.forward = functools.partial(_recomputed, model, contexts, block.forward)


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operation.name().partition(".")[0] in _COSTLY
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(
    model: nn.Module, contexts: Callable[[], Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make `forward` use the current attention implementation and the watch of the routers, even when the backward pass
    runs it again.

    By then the `using` and `over` blocks of the first run have ended.
    """
    name, resumed = cast(Any, model).config._attn_implementation, resuming(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        with attention.using(model, name), resumed():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)
