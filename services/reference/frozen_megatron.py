"""Provides a frozen model that only scores, sharded across tensor-, pipeline- and context-parallel ranks.

It holds no gradients and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from proto.messages import ErrorCode
from proto.tensors import Array
from shared.megatron.cpu_shims import in_megatron
from shared.megatron.pieces import Pieces
from shared.model.picks import Likeliest
from shared.ranks.layout import RankPlace
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.models import Head


class FrozenMegatron:
    """Implements `frozen.Frozen` for Llama, Qwen2 and Qwen3 models. The process group of all ranks must be open."""

    @in_megatron
    def __init__(
        self, model: Path, dtype: str, max_tokens: int, place: RankPlace, device: str, head: Head = "language"
    ) -> None:
        """`max_tokens` limits one micro-batch. Raises RpcError(bad_request) if megatron does not support the model."""
        self._pieces = Pieces(model, dtype, place, device=device, max_tokens=max_tokens, head=head)
        self._pieces.model.eval().requires_grad_(False)

    @in_megatron
    def load(self) -> None:
        self._pieces.copy_in(self._pieces.files)

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        return self._pieces.converter.shapes

    @in_megatron
    def take(self, weights: Mapping[str, Array]) -> None:
        self._pieces.copy_in(lambda name: to_torch(weights[name]))

    @in_megatron
    @torch.no_grad()
    def logprobs(
        self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float, on_part: Callable[[], None]
    ) -> Array:
        hook = self._pieces.model.register_forward_hook(lambda *_: on_part())
        try:
            return to_numpy(self._pieces.outputs(token_ids, lengths, loss_mask, temperature))
        finally:
            hook.remove()

    def likeliest(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        wanted: Likeliest,
        on_part: Callable[[], None],
    ) -> tuple[Array, Array]:
        text = "the ranks of backend megatron share the vocabulary, and none knows the likeliest tokens; use torch"
        raise RpcError(ErrorCode.BAD_REQUEST, text)

    def tensors(self) -> list[Tensor]:
        return [*self._pieces.model.parameters(), *self._pieces.model.buffers()]
