"""Remembers which passes may compute the log-probs of a model. See `shared.topology.passes`."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from shared.topology.passes import Passes

_PLAIN = Passes()


def allow(model: nn.Module, passes: Passes | None) -> None:
    """Let `passes` compute the log-probs of `model`; None: only those that assume nothing about it."""
    cast(Any, model).allowed_passes = passes or _PLAIN


def passes_of(model: nn.Module) -> Passes:
    """Return the passes that may compute the log-probs of `model`."""
    return cast(Passes, getattr(model, "allowed_passes", _PLAIN))
