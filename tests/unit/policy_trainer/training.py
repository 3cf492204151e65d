"""Provides tests with a torch backend on one rank, and with a function that runs one mini-batch through it as the
worker's calls do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from proto.messages import AdamW, LossSpec
from proto.tensors import Array
from services.policy_trainer.update import optimizer_numbers
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from services.policy_trainer.worker.losses.tokens import TokenData
from shared.model.adapter import AdapterStart
from shared.ranks.layout import Layout
from shared.topology.algorithm import Optimizer
from shared.topology.models import Head
from shared.topology.passes import FASTEST


def adamw(step: int = 1, **options: Any) -> AdamW:
    """Return the numbers of an update of `step` with these options of the topology's section `optimizer`."""
    return optimizer_numbers(Optimizer(**{"lr": 1e-3, **options}), step)


def one_rank(
    folder: Path, dtype: str, *, max_tokens: int, head: Head = "language", adapter: AdapterStart | None = None
) -> TorchBackend:
    """Return a backend on the CPU for the model in `folder`."""
    scratch = folder / "offloaded"
    options = BackendOptions(
        max_tokens, threads=1, device="cpu", scratch=scratch, passes=FASTEST, head=head, adapter=adapter
    )
    return TorchBackend(folder, dtype, options, Layout(1).place(0))


def token_data(
    *,
    rollout: Tensor,
    versions: Tensor,
    prox: Tensor | None = None,
    ref: Tensor | None = None,
    teacher: Tensor | None = None,
    topk: Tensor | None = None,
    **others: Any,
) -> TokenData:
    """Return the data of tokens whose shards have these values. `others` are the other fields of `TokenData`."""
    named = {"rollout_logprobs": rollout, "versions": versions, "prox_logprobs": prox, "ref_logprobs": ref}
    named |= {"teacher_logprobs": teacher, "teacher_topk": topk}
    return TokenData(shards={key: values for key, values in named.items() if values is not None}, **others)


def accumulate(
    made: TorchBackend, spec: LossSpec, flat: dict[str, Array], advantages: Array, weights: Array
) -> dict[str, float]:
    """Accumulate the gradient of the loss over all sequences of `flat`; `advantages` and `weights` are [T]."""
    loss = BatchLoss(spec, flat, advantages, weights, "cpu")
    mask = flat["loss_mask"] * (weights != 0)
    sequences = Sequences(flat["token_ids"], flat["lengths"], mask)
    return made.forward_backward(sequences, spec.temperature, loss, entropy=loss.entropy, others=loss.others)
