"""Provides a frozen model that only scores, held as a whole by one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from proto.tensors import Array
from shared.model.adapter import AdapterStart, adapt, trained_weights
from shared.model.load import allow, load_model
from shared.model.logprobs import score
from shared.model.picks import Likeliest
from shared.ranks.process_group import own_device
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.models import Head
from shared.topology.passes import Passes


class Frozen(Protocol):
    """A model that only scores. Use it only on a compute thread. With several ranks, every method is a collective."""

    def load(self) -> None:
        """Load the weights from the model directory. Raises RpcError(bad_request) if it has no usable weights."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Full shape of every tensor of a version by name. Call `load` first."""
        ...

    def take(self, weights: Mapping[str, Array]) -> None:
        """Copy in `weights`, which holds every tensor of a version in full, by name."""

    def logprobs(
        self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float, on_part: Callable[[], None]
    ) -> Array:
        """Return the log-probs of a language model, or the values before the tokens of a value model, float32 [T],
        identical on all ranks and 0 where the mask is 0.

        `on_part` is called once per micro-batch.
        """
        ...

    def likeliest(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        wanted: Likeliest,
        on_part: Callable[[], None],
    ) -> tuple[Array, Array]:
        """Return the ids, int32 [n, k], and log-probs, float32 [n, k], of the likeliest tokens at each token whose mask
        is 1, the likeliest first. Raises RpcError(bad_request) if the model cannot say them.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """Return all tensors of this rank that `Shelf` may move off the device."""
        ...


class FrozenTorch:
    """Implements `Frozen` for any Hugging Face causal language model on one rank."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        max_tokens: int,
        device: str = "cpu",
        passes: Passes | None = None,
        adapter: AdapterStart | None = None,
        head: Head = "language",
    ) -> None:
        """`max_tokens` limits one forward pass. `device` is `cpu`, or `cuda` for the process's first GPU. `passes` are
        the model's; None: those that assume nothing about it. With an `adapter`, versions are adapters. With a value
        `head`, log-probs are values."""
        self._adapter = adapter
        self._head = head
        self._passes = passes
        self._device = device
        self._path = model
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._model: list[nn.Module] = []  # filled by `load`

    def load(self) -> None:
        self._model.clear()  # so that two copies never exist at the same time
        device = own_device(self._device, 0)
        model = load_model(self._path, self._dtype, self._head)
        if self._adapter is not None:
            adapt(model, self._adapter, scaled=True)
        model.eval().requires_grad_(False).to(device)
        allow(model, self._passes)
        self._model.append(model)

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: tensor.shape for name, tensor in trained_weights(self._model[0]).items()}

    @torch.inference_mode()
    def take(self, weights: Mapping[str, Array]) -> None:
        for name, tensor in trained_weights(self._model[0]).items():
            tensor.copy_(to_torch(weights[name]))

    @torch.inference_mode()
    def logprobs(
        self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float, on_part: Callable[[], None]
    ) -> Array:
        logprobs = torch.zeros(len(token_ids), device=self._device)  # copied once, or a GPU would idle after every part
        for part in score(self._model[0], token_ids, lengths, loss_mask, temperature, self._max_tokens):
            logprobs[part.tokens] = part.outputs.float()
            on_part()
        return to_numpy(logprobs)

    @torch.inference_mode()
    def likeliest(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        wanted: Likeliest,
        on_part: Callable[[], None],
    ) -> tuple[Array, Array]:
        place = torch.from_numpy(np.cumsum(loss_mask, dtype=np.int64) - 1).to(self._device)
        shape = (int(np.count_nonzero(loss_mask)), wanted.count)
        ids, logprobs = (torch.zeros(shape, dtype=dtype, device=self._device) for dtype in (torch.int32, torch.float32))
        for part in score(self._model[0], token_ids, lengths, loss_mask, temperature, self._max_tokens, others=wanted):
            if part.others is not None and part.other_ids is not None:
                ids[place[part.tokens]] = part.other_ids.int()
                logprobs[place[part.tokens]] = part.others.float()
            on_part()
        return to_numpy(ids), to_numpy(logprobs)

    def tensors(self) -> list[Tensor]:
        return [*self._model[0].parameters(), *self._model[0].buffers()] if self._model else []
