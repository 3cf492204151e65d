"""Holds a whole model on one rank, with the parameters that the optimizer trains. 16-bit weights have float32 masters,
because an update of 1e-6 would vanish in bfloat16, as would a micro-batch's gradient in a long sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared.model.adapter import trained_weights
from shared.model.logprobs import TokenScorer


class Replica:
    """A model on one rank. `scorer` runs it; `masters` are the optimizer's parameters by Hugging Face name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.scorer = TokenScorer(model)
        self.masters: dict[str, nn.Parameter] = {}
        self._params = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, param in self._params.items():
            low = param.dtype in (torch.bfloat16, torch.float16)
            self.masters[name] = nn.Parameter(param.detach().float()) if low else param
            if low:
                cast(Any, param).register_post_accumulate_grad_hook(self._accumulate_into(self.masters[name]))
        self.separate = {name for name, param in self._params.items() if self.masters[name] is not param}
        """Names of weights whose master is a separate tensor."""

    @staticmethod
    def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
        def move(param: Tensor) -> None:
            if param.grad is None:
                return
            # The sum converts the 16-bit gradient itself, in one kernel.
            master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
            param.grad = None

        return move

    def expect_backward(self, *, last: bool) -> None:
        """Do nothing: there are no other ranks whose gradients would be added."""

    def drop_unsummed(self) -> None:
        """Do nothing: gradients are always summed."""

    def after_inference(self) -> None:
        """Do nothing: a pass without a gradient leaves nothing to free."""

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters to their weights."""
        _copy_all(self._own_params(), self.own_masters())

    def weights(self) -> dict[str, Tensor]:
        """Return the live weights of a version, which change with the next update."""
        return trained_weights(self.model)

    def own_weights(self) -> dict[str, Tensor]:
        """Return the live weights."""
        return self.weights()

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy full weights of the same names and shapes into the model and its masters."""
        for name, tensor in trained_weights(self.model).items():
            tensor.copy_(weights[name])
        _copy_all(self.own_masters(), self._own_params())

    def whole(self, part: Tensor) -> Tensor:
        """Return a host copy of the full tensor. `part`, shaped like a master, is this rank's part of it."""
        return part.detach().to("cpu", copy=True)

    def part(self, whole: Tensor, master: nn.Parameter) -> Tensor:
        """Return this rank's part of a full tensor, split like `master`."""
        return whole.to(master.device, master.dtype, copy=True)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Full shape of every weight of a version."""
        return {name: tensor.shape for name, tensor in trained_weights(self.model).items()}

    def whole_scalar(self, value: Tensor) -> float:
        """Return `value`, a scalar computed over all masters, as a number."""
        return float(value)

    def own_masters(self) -> list[Tensor]:
        """Return the masters that are separate tensors."""
        return [self.masters[name] for name in sorted(self.separate)]

    def _own_params(self) -> list[Tensor]:
        """Return the weights of `own_masters`."""
        return [self._params[name] for name in sorted(self.separate)]

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the model on this rank."""
        return [*self.model.parameters(), *self.model.buffers()]


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target. A GPU copies many tensors in one kernel."""
    if targets:
        torch._foreach_copy_(targets, sources)
