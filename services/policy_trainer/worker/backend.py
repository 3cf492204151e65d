"""What a training library must do to serve as a backend: the one contract of `backend_torch` and `backend_megatron`.

Every method runs on the compute thread of every rank, in the same order: each is a collective, even for a rank that
has no samples. A backend knows no bus, no store, no advantage and no loss function; it never normalises: gradients are
the plain *sum* of dL over all ranks, L being the sum over all ranks of what `TokenLoss` returns (DESIGN promise 7).

State has one form whatever the layout: full tensors under their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from proto.tensors import Array
from services.policy_trainer.worker.residency import Part
from shared.model.logprobs import Entropy, Scores
from shared.ranks.layout import Place

OPTIMIZER_SLOTS = ("step", "exp_avg", "exp_avg_sq", "master")
"""Keys of `State.optimizer` are `<slot>/<parameter>`; `master` only where weights have fewer than 32 bits."""


@dataclass(frozen=True)
class Sequences:
    """The samples of this data-parallel rank (the same on all its tp, pp and cp ranks), maybe none at all.

    `token_ids` int [T], `lengths` int [S] summing to T, `loss_mask` [T] of 0 and 1: never 1 at a first token.
    """

    token_ids: Array
    lengths: Array
    loss_mask: Array


@dataclass(frozen=True)
class LocalScores:
    """Masked-in tokens of one micro-batch that *this rank* holds, possibly none (M = 0).

    `scores.tokens` are positions in the flat arrays of `Sequences`: mask, advantages and old log-probs are looked up
    there, so that nothing is shifted twice. `sum_over_sequence_ranks` adds up a detached tensor over the ranks among
    which these sequences are cut (cp); without cp it gives back what it gets. Must not be used on a tensor with a
    gradient. All sequences of a micro-batch are whole when those ranks are taken together.
    """

    scores: Scores
    sum_over_sequence_ranks: Callable[[Tensor], Tensor]


TokenLoss = Callable[[LocalScores], tuple[Tensor, Mapping[str, Tensor]]]
"""(sum of W * loss over the given tokens, a scalar with a gradient; additive detached sums for metrics).

Called once a micro-batch on every rank with `place.counts`, with M = 0 too; for a micro-batch that exists only because
another data-parallel rank has more of them it is not called on any rank.
"""


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: norm of the whole gradient before clipping, and the learning rate."""

    grad_norm: float
    lr: float


@dataclass(frozen=True)
class State:
    """Everything that a later life needs to go on with the same bits.

    `weights`: Hugging Face name -> full tensor in the topology's dtype, on the CPU, tied weights once (as
    `shared.model.load.named_weights`). `optimizer`: `<slot>/<name>` -> full float32 tensor of the weight's shape,
    `step` a float32 scalar (number of updates). Copies: training may go on while they are written.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class Backend(Protocol):
    """A model in training. Constructors take (model_dir, dtype, Optimizer, BackendOptions, Place)."""

    place: Place

    @property
    def model(self) -> nn.Module:
        """What is called once a micro-batch."""
        ...

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the whole model, a tied one once."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def restart(self) -> None:
        """The weights of the model directory, fresh optimizer state, no gradient."""

    def forward(self, sequences: Sequences, temperature: float) -> Array:
        """float32 [T]: log p(token) of logits / temperature where the mask is 1, else 0; no gradient.

        Complete on every rank: rank 0, which publishes, leads nothing when the model is cut into pipeline stages.
        """
        ...

    def forward_backward(
        self, sequences: Sequences, temperature: float, loss: TokenLoss, *, entropy: Entropy
    ) -> dict[str, float]:
        """Add the gradient of the loss over all micro-batches; returns the sums of `loss`.

        Ranks without `place.counts` return {}: adding up the answers of all ranks gives the sums of the batch.
        """
        ...

    def step(self, step: int) -> Update:
        """Clip by the norm of the whole gradient, update, drop the gradient; `step` (from 1) sets the warm-up.

        Raises RpcError(bad_data), on every rank alike, when the norm is not finite: nothing is changed then.
        """
        ...

    def drop_gradients(self) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        """Full weights as in `State.weights`: on rank 0; {} elsewhere. May share memory with the model."""
        ...

    def state(self) -> State:
        """On rank 0; empty elsewhere."""
        ...

    def load_state(self, state: State) -> None:
        """Take over a `State` that every rank read, whatever layout and backend wrote it; drops gradients.

        Raises RpcError(conflict), before anything is changed, when it is of another model.
        """

    def export(self, folder: Path) -> None:
        """Write config.json and safetensors of the Hugging Face model into `folder`, on rank 0 (no tokenizer)."""

    def offload(self, parts: frozenset[Part]) -> int:
        """Free the device memory of `parts`, all bits kept; returns bytes freed on this rank. Idempotent."""
        ...

    def backload(self, parts: frozenset[Part]) -> int:
        """Bring `parts` back; returns bytes moved on this rank. Idempotent."""
        ...


@dataclass(frozen=True)
class BackendOptions:
    """`max_tokens`: of one micro-batch on one data-parallel rank; `scratch`: a folder for what is offloaded on CPU."""

    max_tokens: int
    threads: int
    device: str
    scratch: Path
    recompute: Literal["none", "layers"] = "none"
