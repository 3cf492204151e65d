"""Implements the megatron backend with tp, pp, cp, ep and dp. It does not normalise gradients.

Transformer Engine is used automatically if it is installed and CUDA is available, together with sequence parallelism
if tp > 1. On a CPU the same layers run on gloo through `cpu_shims`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proto.messages import AdamW, ErrorCode
from proto.tensors import Array
from services.policy_trainer.worker.backend import (
    BackendOptions,
    PartShelves,
    Sequences,
    TokenLoss,
    check_same_model,
    refused_gradient,
    totals_of,
)
from services.policy_trainer.worker.megatron.trained import Trained
from services.policy_trainer.worker.slots import Slots
from services.policy_trainer.worker.training_state import TrainingState
from shared.colocation.devices import Part
from shared.megatron import files
from shared.megatron.cpu_shims import in_megatron
from shared.megatron.pieces import Pieces
from shared.model import cpu
from shared.model.logprobs import Entropy, Scores
from shared.model.picks import IdsOf
from shared.model.value_head import classifier_config
from shared.ranks.layout import RankPlace
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy
from shared.weights.weight_set import Base


class MegatronBackend:
    """The `backend.Backend` for models of megatron-core."""

    @in_megatron
    def __init__(self, model_dir: Path, dtype: str, options: BackendOptions, place: RankPlace) -> None:
        """Raises RpcError(bad_request) if the model cannot be loaded, and ValueError if the layout does not divide the
        model."""
        cpu.set_up(options.threads)
        self.place = place
        self._options = options
        self._source = model_dir
        self._pieces = Pieces(
            model_dir, dtype, place, device=options.device, max_tokens=options.max_tokens, head=options.head
        )
        self._groups = self._pieces.groups
        if options.recompute == "layers":
            self._pieces.model.recompute_layers()
        self._trained = Trained(self._pieces)
        self.shelves = PartShelves(options.scratch, self._tensors)
        self._trained.set_weights(self._pieces.files)
        self._trained.drop_gradients()

    base: Base | None = None
    slots: Slots | None = None

    @property
    def parameters(self) -> int:
        return self._pieces.converter.elements

    @property
    def called(self) -> nn.Module:
        """Megatron's wrapper around this rank's pieces."""
        wrapped: nn.Module = self._trained.model
        return wrapped

    @property
    def vocab_size(self) -> int:
        return self._pieces.architecture.vocab

    def fill_moments(self) -> None:
        raise AssertionError("backend megatron has no slots")

    @in_megatron
    def restart(self) -> None:
        """Reload the weights from the model directory and reset the optimizer state."""
        self.shelves.backload()
        self._trained.set_weights(self._pieces.files)
        self._trained.drop_gradients()

    # ---- passes

    @in_megatron
    @torch.no_grad()
    def forward(self, sequences: Sequences, temperature: float) -> Array:
        """Return the log-probs or values, float32 [T].

        They are complete on every rank, because rank 0, which publishes, may be in a stage without a head.
        """
        ids, lengths, mask = sequences.token_ids, sequences.lengths, sequences.loss_mask
        return to_numpy(self._pieces.outputs(ids, lengths, mask, temperature, self._trained.model))

    @in_megatron
    def forward_backward(
        self,
        sequences: Sequences,
        temperature: float,
        loss: TokenLoss,
        *,
        entropy: Entropy,
        others: IdsOf | None = None,
        backward: bool = True,
    ) -> dict[str, float]:
        """Add the unscaled gradient of every micro-batch to the buffers. `step` sums them over the ranks.

        Raises RpcError(bad_request) for what only clients' models need.
        """
        if sequences.targets is not None or not backward:
            raise RpcError(ErrorCode.BAD_REQUEST, "backend megatron trains no models of clients; use backend torch")
        parts: list[Mapping[str, Tensor]] = []

        def shared_loss(scores: Scores) -> Tensor:
            return self._on_every_rank(scores, loss, parts)

        self._pieces.run(
            sequences.token_ids,
            sequences.lengths,
            sequences.loss_mask,
            temperature,
            entropy,
            shared_loss,
            others=others,
            model=self._trained.model,
            forward_only=False,
        )
        return totals_of(parts)

    def _on_every_rank(self, scores: Scores, loss: TokenLoss, parts: list[Mapping[str, Tensor]]) -> Tensor:
        """Return a scalar with the gradient of `loss`, which only one rank of a tensor-parallel group computes."""
        fields = {"outputs": scores.outputs, "entropy": scores.entropy, "others": scores.others}
        outputs = {name: values for name, values in fields.items() if values is not None and values.requires_grad}
        widths = [values[0].numel() if len(values) else 1 for values in outputs.values()]
        grads = scores.outputs.new_zeros((len(scores.tokens), sum(widths)))
        if self.place.counts:
            leaves: dict[str, Any] = {name: values.detach().requires_grad_() for name, values in outputs.items()}
            total, sums = loss(replace(scores, **leaves), self._groups.sum_over_sequence_ranks)
            parts.append(sums)
            if total.requires_grad:
                computed = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
                for columns, grad in zip(torch.split(grads, widths, 1), computed, strict=True):
                    if grad is not None:
                        columns.copy_(grad.view(columns.shape))
        self._groups.first_of_tp(grads)
        return sum(
            (
                (values * grad.view(values.shape)).sum()
                for values, grad in zip(outputs.values(), torch.split(grads, widths, 1), strict=True)
            ),
            scores.outputs.new_zeros(()),
        )

    # ---- updates

    @in_megatron
    def step(self, step: int, optimizer: AdamW) -> float:
        """Sum the gradients over ranks, clip, step, zero the gradients, and return their norm.

        Raises RpcError(bad_data) if the gradient is not finite; weights and optimizer state then remain unchanged.
        """
        self._trained.reduce()
        grad_norm = self._trained.norm()
        if not math.isfinite(grad_norm):
            self.drop_gradients()
            raise refused_gradient(step, grad_norm)
        self._trained.update(grad_norm, optimizer)
        self.drop_gradients()
        return grad_norm

    @in_megatron
    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.shelves.backload(frozenset(["gradients"]))
        self._trained.drop_gradients()

    # ---- state

    @in_megatron
    def weights(self) -> dict[str, Tensor]:
        """Return the full weights on rank 0 and {} elsewhere."""
        return self._trained.weights()

    def published(self) -> dict[str, Tensor]:
        """Return the full weights on rank 0."""
        return self.weights()

    @in_megatron
    def state(self) -> TrainingState:
        """Return copies of the weights and the AdamW state on rank 0."""
        return self._trained.state()

    @in_megatron
    def load_state(self, state: TrainingState) -> None:
        """Load a checkpoint's state. Raises RpcError(conflict) if it belongs to another model."""
        check_same_model(self._pieces.converter.shapes, state.weights, self._source)
        self.shelves.backload()
        self._trained.set_weights(state.weights.__getitem__)
        self._trained.set_optimizer(state.optimizer)
        self._trained.drop_gradients()

    @in_megatron
    def own_state(self) -> dict[str, Tensor]:
        """Return the live weights, masters and AdamW state of this rank."""
        return self._trained.own_state()

    @in_megatron
    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors back into the weights, the masters and a new AdamW."""
        self.shelves.backload()
        self._trained.set_own_state(state)
        self._trained.drop_gradients()

    @in_megatron
    def export(self, folder: Path) -> None:
        """Write the configuration and the weights on rank 0. Every rank must call this."""
        weights = self._trained.weights()
        if self.place.rank == 0:
            config = self._pieces.config
            if self._options.head == "value":
                config = classifier_config(config, self._pieces.converter.shapes)
            files.write(folder, config, weights, self._pieces.dtype, self._pieces.stored)

    # ---- memory

    def _tensors(self, part: Part) -> list[Tensor]:
        match part:
            case "parameters":
                return self._trained.tensors()
            case "gradients":
                return self._trained.gradient_buffers()
            case "optimizer":
                return self._trained.optimizer_tensors()
