"""Tracks the publication of versions on the rank that publishes them. The module does not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from proto.messages import WeightsRef

if TYPE_CHECKING:
    from services.policy_trainer.worker.weights.sender import WeightsSender


class Publishing:
    """At most one publication at a time, whose weights must not change before it ends. Use it only on the event
    loop."""

    def __init__(self, sender: WeightsSender | None) -> None:
        """`sender` sends published versions to engines that ask for them, or is None if engines only read stores."""
        self._sender = sender
        self._pending: asyncio.Future[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which reads the weights, in the background."""
        self._pending = asyncio.ensure_future(work)

    def published(self, ref: WeightsRef, weights: Mapping[str, Any]) -> None:
        """Let engines ask for the version `ref`, whose `weights` do not change before `settled` is called."""
        if self._sender is not None:
            self._sender.published(ref, weights)

    async def settled(self) -> None:
        """Wait until neither the publication nor an engine is reading the weights."""
        if self._pending is not None:
            await self._pending
            self._pending = None
        if self._sender is not None:
            self._sender.changing()
