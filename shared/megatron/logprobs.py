"""Computes log-probs and entropies from logits whose vocabulary is split across tensor-parallel ranks.

Padding rows of the vocabulary do not enter the softmax. Every rank of the group gets the same values, and the gradient
that flows back must be the same on each of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from shared.model.logprobs import Entropy


def token_logprobs(
    logits_PV: Tensor,
    predictor_C: Tensor,
    token_C: Tensor,
    temperature: float,
    entropy: Entropy,
    *,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs [C] and, if requested, the entropies [P] of logits / `temperature`.

    `logits_PV` holds this rank's columns. The log-probs are those of tokens `token_C` at predictors `predictor_C`
    (int64 [C]). Both results are float32, or float64 if the logits are. `vocab` is the number of tokens. The columns
    after them are padding, equivalent to -inf, and are cut off.
    """
    columns = logits_PV.shape[1]
    start = group.rank() * columns
    real = max(0, min(columns, vocab - start))
    scaled_PV = logits_PV[:, :real] if logits_PV.dtype == torch.float64 else logits_PV[:, :real].float()
    if temperature != 1.0:
        scaled_PV = scaled_PV / temperature
    with torch.no_grad():
        most_P = scaled_PV.new_full((len(scaled_PV),), -torch.inf)
        if real:
            most_P = scaled_PV.amax(1)
        if group.size() > 1:
            dist.all_reduce(most_P, op=dist.ReduceOp.MAX, group=group)
    shifted_PV = scaled_PV - most_P[:, None]
    exp_PV = shifted_PV.exp()
    total_P = reduce_from_tensor_model_parallel_region(exp_PV.sum(1), group=group)
    mine_C = (token_C >= start) & (token_C < start + real)
    if real:
        picked_C = shifted_PV[predictor_C, torch.where(mine_C, token_C - start, 0)]
        picked_C = torch.where(mine_C, picked_C, 0.0)
    else:
        picked_C = shifted_PV.sum(1)[predictor_C]  # zeros that stay connected to the graph
    chosen_C = reduce_from_tensor_model_parallel_region(picked_C, group=group)
    logprobs_C = chosen_C - total_P.log()[predictor_C]
    if entropy == "none":
        return logprobs_C, None
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        weighted_P = reduce_from_tensor_model_parallel_region((exp_PV * shifted_PV).sum(1), group=group)
        return logprobs_C, total_P.log() - weighted_P / total_P
