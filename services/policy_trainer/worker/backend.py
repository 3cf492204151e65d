"""Defines the interface of training backends, which `backend_torch` and `megatron.backend` implement.

Every method runs on the compute thread of every rank in the same order. Unless stated otherwise, each is a collective,
even for a rank without samples. Backends know nothing of the bus, stores, advantages or loss functions. They do not
normalise: gradients are the plain *sum* of dL over all ranks, where L is the sum of a rank's `TokenLoss` values
(docs/architecture.md, promise 7).

State has the same form in every layout: full tensors under their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proto.messages import AdamW, ErrorCode
from proto.tensors import Array
from services.policy_trainer.metrics import add_up
from services.policy_trainer.worker.slots import Slots
from services.policy_trainer.worker.training_state import TrainingState
from shared.colocation.devices import PARTS, Part
from shared.colocation.shelf import Shelf
from shared.model.adapter import AdapterStart
from shared.model.load import mismatched_weights
from shared.model.logprobs import Entropy, Routing, Scores
from shared.model.picks import IdsOf
from shared.model.tree import GivenTargets
from shared.ranks.layout import RankPlace
from shared.rpc.errors import RpcError
from shared.topology.models import Head
from shared.topology.passes import Passes
from shared.topology.services import Recompute
from shared.weights.weight_set import Base


@dataclass(frozen=True)
class Sequences:
    """The samples of this data-parallel rank, possibly none. They are the same on all its tp, pp and cp ranks.

    `token_ids` int [T], `lengths` int [S] with sum T, `loss_mask` [T] of 0 and 1, which is 0 at the first token
    of each sequence. If there are `targets`, they are scored instead of the tokens with mask 1, and positions of scored
    tokens are positions among them. With `routing`, the routers of a mixture of experts are watched (backend torch),
    and `balance` is the factor of the load-balancing loss.
    """

    token_ids: Array
    lengths: Array
    loss_mask: Array
    targets: GivenTargets | None = None
    routing: Routing | None = None
    balance: float = 0.0


TokenLoss = Callable[[Scores, Callable[[Tensor], Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""Function that returns the sum of W * loss over the tokens, a scalar with a gradient, and detached sums for metrics.

It is called once per micro-batch on every rank with `place.counts`, even if M = 0. It is not called for padding
micro-batches, which a rank runs only because another data-parallel rank has more micro-batches.

Its first argument are the tokens of one micro-batch on *this rank* that count in the loss, possibly none (M = 0). Their
`tokens` are positions in the flat arrays of `Sequences`: mask, advantages and old log-probs are looked up there, so
that nothing is shifted twice. The second argument sums a detached tensor over the ranks that share these sequences
(cp), which together hold every sequence of a micro-batch completely; without cp it returns its argument. It must not be
used on a tensor with a gradient.
"""


OnAdapted = Callable[[nn.Module, AdapterStart], None]
"""Called on rank 0 with the whole model, once it has its first adapter, and before it is moved or divided. The adapter
must be the first one again when it returns."""


def ignore_adapted(model: nn.Module, start: AdapterStart) -> None:
    """Do nothing."""


class PartShelves:
    """One shelf for each part of this rank's state. Use them only on the compute thread."""

    def __init__(self, folder: Path, tensors: Callable[[Part], list[Tensor]]) -> None:
        """`tensors` returns the current tensors of a part. Those on a CPU are written to files in `folder`."""
        self._tensors = tensors
        self._shelves = {part: Shelf(folder / f"{part}.bin") for part in PARTS}

    def offload(self, parts: frozenset[Part]) -> int:
        """Free the device memory of `parts`, keep their bits, and return the number of bytes freed. Repeated calls do
        nothing."""
        there = [part for part in sorted(parts) if not self._shelves[part].holds]
        return sum(self._shelves[part].put(self._tensors(part)) for part in there)

    def backload(self, parts: frozenset[Part] = PARTS) -> int:
        """Move `parts` back to the device and return the number of bytes moved. Repeated calls do nothing."""
        return sum(self._shelves[part].take() for part in sorted(parts))


class Backend(Protocol):
    """A model in training. Constructors of backends take (model_dir, dtype, BackendOptions, RankPlace)."""

    place: RankPlace
    shelves: PartShelves
    base: Base | None
    """The weights over which the trained adapter lies, on rank 0; None if all weights are trained."""
    slots: Slots | None
    """How this backend holds the models of a server's clients; None if it cannot train any."""

    @property
    def called(self) -> nn.Module:
        """The module that is called once per micro-batch."""
        ...

    @property
    def parameters(self) -> int:
        """Number of elements in all parameters of the whole model, trained or not. Tied parameters count once."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def restart(self) -> None:
        """Reload the weights from the model directory, reset the optimizer state and drop the gradient."""

    def fill_moments(self) -> None:
        """Give the optimizer the moments of a first update, which are zero, where it has none, so that the state no
        longer grows. Only a backend with `slots` can be asked. This is no collective."""

    def forward(self, sequences: Sequences, temperature: float) -> Array:
        """Return log p(token) of logits / temperature, or a value model's value of the state before the token, where
        the mask is 1, else 0: float32 [T] without a gradient.

        The result is complete on every rank, because rank 0, which publishes, may belong to a stage without logits.
        """
        ...

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
        """Add the gradient of the loss over all micro-batches and return the sums of `loss`. Without `backward`, run
        the same passes but add nothing.

        Ranks without `place.counts` return {}, so adding up the answers of all ranks gives the sums of the batch.
        """
        ...

    def step(self, step: int, optimizer: AdamW) -> float:
        """Clip by the norm of the whole gradient, update, and drop the gradient. Return the norm before clipping.

        Raises RpcError(bad_data), which names `step`, on all ranks and without changing anything, if the norm is not
        finite.
        """
        ...

    def drop_gradients(self) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        """Return weights in the form of `TrainingState.weights` on rank 0 and {} elsewhere. They may share the model's
        memory."""
        ...

    def published(self) -> dict[str, Tensor]:
        """Return what engines need of the current version on rank 0 and {} elsewhere. They may share the model's
        memory. It need not be what a checkpoint or an export holds."""
        ...

    def state(self) -> TrainingState:
        """Return the state on rank 0 and an empty one elsewhere."""
        ...

    def load_state(self, state: TrainingState) -> None:
        """Load `state`, which every rank has read, and drop gradients. Any layout and backend may have written it.

        Raises RpcError(conflict), before anything is changed, if the state belongs to another model.
        """

    def own_state(self) -> dict[str, Tensor]:
        """Return the live tensors of this rank's part of the weights, the optimizer state and the accumulated gradient,
        if there is one, by name. The next update changes them.

        Neither this method nor `load_own_state` is a collective.
        """
        ...

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `own_state` returned in another life of the same rank in the same layout. Without a
        gradient among them, there is none afterwards."""

    def export(self, folder: Path) -> None:
        """Write the Hugging Face model's config.json and safetensors files into `folder` on rank 0 (no tokenizer)."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a backend. `max_tokens` limits a micro-batch on one data-parallel rank. Parts that are offloaded on a
    CPU are written to the folder `scratch`."""

    max_tokens: int
    threads: int
    device: str
    scratch: Path
    recompute: Recompute = "none"
    passes: Passes | None = None
    """The passes of the model; None: those that assume nothing about it."""
    head: Head = "language"
    adapter: AdapterStart | None = None
    """The adapter that is trained, or None if the whole model is."""
    on_adapted: OnAdapted = ignore_adapted


def set_numbers(groups: Iterable[dict[str, Any]], optimizer: AdamW) -> None:
    """Put the numbers of the next update into the parameter groups of torch's AdamW."""
    for group in groups:
        group["lr"], group["betas"] = optimizer.lr, (optimizer.beta1, optimizer.beta2)
        group["eps"], group["weight_decay"] = optimizer.eps, optimizer.weight_decay


def refused_gradient(step: int, grad_norm: float) -> RpcError:
    """Return the error for a gradient of `step` whose norm is not finite."""
    return RpcError(
        ErrorCode.BAD_DATA,
        f"step {step} refused, weights untouched: gradient norm is {grad_norm}; look for extreme log-probs or "
        "advantages in its batch, or lower optimizer.lr",
    )


def totals_of(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the totals that `add_up` computes from the micro-batch sums, in order, after one copy to the host.

    With a copy per sum, the host would wait for the GPU many times in every micro-batch.
    """
    totals: dict[str, float] = {}
    values = [value.double() for part in parts for value in part.values()]
    numbers = iter(torch.stack(values).tolist() if values else [])
    for part in parts:
        add_up(totals, {name: next(numbers) for name in part})
    return totals


def check_same_model(shapes: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor], source: Path) -> None:
    """Raise RpcError(conflict) if `weights` do not have the names and `shapes` of the model in folder `source`."""
    wrong = mismatched_weights(shapes, {name: tensor.shape for name, tensor in weights.items()})
    if wrong:
        raise RpcError(ErrorCode.CONFLICT, f"weights of another model: {', '.join(wrong[:3])} do not fit {source}")
