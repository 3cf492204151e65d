"""The loss of a client's model over the targets of one call, and the log-probs that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from proto.tensors import Array
from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.losses.given import LOSSES
from services.policy_trainer.worker.samples import TARGETS, BatchTokens
from shared.model.logprobs import Scores
from shared.model.tree import GivenTargets
from shared.rpc.errors import RpcError
from shared.stages import GIVEN_LOSSES, Per, loss_keys
from shared.tensors_torch import to_device, to_numpy


class GivenLoss:
    """A `TokenLoss` over the targets of this data-parallel rank."""

    def __init__(self, spec: LossSpec, flat: Mapping[str, Array], device: str) -> None:
        """`flat` holds the joined shards. `check_spec` must have accepted `spec`."""
        names = [key.name for key in loss_keys(spec) if key.name != TARGETS and key.per is not Per.SEQUENCE]
        names.remove("token_ids")
        self._spec = spec
        self._shards = dict(zip(names, to_device([flat[name] for name in names], torch.device(device)), strict=True))
        self._logprobs = torch.zeros(len(flat[TARGETS]), device=device)
        self._add_up: Callable[[Tensor], Tensor] | None = None

    def __call__(self, scores: Scores, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self._add_up = add_up
        self._logprobs[scores.tokens] = scores.outputs.detach().float()
        shards = {name: values[scores.tokens] for name, values in self._shards.items()}
        values, sums = LOSSES[self._spec.name](self._spec, scores.outputs, shards)
        total = values.sum()
        return total, {"loss": total.detach(), "tokens": total.new_full((), float(len(values))), **sums}

    def logprobs(self) -> Array:
        """Return the log-probs of all targets, float32 [M], after the last micro-batch. All ranks that share the
        sequences must call this."""
        whole = self._logprobs if self._add_up is None else self._add_up(self._logprobs)
        return to_numpy(whole)


def check_spec(spec: LossSpec) -> None:
    """Raise RpcError(bad_request) if `spec` is no loss of a client's model, or the temperature is not above 0."""
    if spec.name not in GIVEN_LOSSES or not 0 < spec.temperature < float("inf"):
        text = f"loss {spec.name} at temperature {spec.temperature:g}: use {', '.join(GIVEN_LOSSES)} above 0"
        raise RpcError(ErrorCode.BAD_REQUEST, text)


def sequences_of(tokens: BatchTokens) -> Sequences:
    """Return the sequences with their given targets: K for each token of a task, in order."""
    flat, several = tokens.flat, tokens.targets_of_task // np.maximum(tokens.tokens_of_task, 1)
    predictors = np.repeat(np.arange(len(flat["token_ids"])), np.repeat(several, tokens.tokens_of_task))
    mask = np.zeros(len(flat["token_ids"]), np.uint8)
    return Sequences(flat["token_ids"], flat["lengths"], mask, GivenTargets(predictors, flat[TARGETS]))


def check_vocabulary(tokens: BatchTokens, names: list[str], size: int) -> None:
    """Raise RpcError(bad_data), which names the tasks, if a token or a target is none of the `size` tokens of the
    vocabulary."""
    per_task = {"token_ids": tokens.tokens_of_task, TARGETS: tokens.targets_of_task}
    for key, counts in per_task.items():
        values = tokens.flat[key]
        wrong = np.flatnonzero((values < 0) | (values >= size))
        if len(wrong):
            tasks = np.unique(np.repeat(np.arange(len(counts)), counts)[wrong])
            text = f"{names[tasks[0]]}: {key} has {values[wrong[0]]}, but the model has the tokens 0 to {size - 1}"
            raise RpcError(ErrorCode.BAD_DATA, text, names=[names[task] for task in tasks])
