"""Finds the repeated blocks (decoder layers) of a Hugging Face model: the unit of sharding and of recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.model import attention


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose classes the model declares unsplittable, or an empty list if it declares none."""
    names = set(cast(Any, model)._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_blocks(model: nn.Module) -> None:
    """Keep only each block's input for the backward pass, which runs the block again (activation checkpointing).

    Blocks keep their names and places, so weights are found as before. Raises ValueError if there are no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks, so services.policy-trainer.recompute must be none")
    for block in blocks:
        block.forward = functools.partial(_recomputed, model, block.forward)


def _recomputed(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make `forward` use the current attention implementation, even when the backward pass runs it again.

    By then the `using` block of the first run has ended.
    """
    name = cast(Any, model).config._attn_implementation

    def run(*args: Any, **kwargs: Any) -> Any:
        with attention.using(model, name):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
