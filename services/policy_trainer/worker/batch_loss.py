"""Binds the loss to one mini-batch: looks up each micro-batch's tokens in the flat arrays of the mini-batch.

This module combines a backend's log-probs with advantages, weights and old log-probs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proto.messages import LossSpec
from proto.tensors import Array
from services.policy_trainer.worker import loss as losses
from services.policy_trainer.worker.backend import LocalScores
from services.policy_trainer.worker.losses.policy import PolicyLoss
from services.policy_trainer.worker.losses.tokens import TokenData
from services.policy_trainer.worker.samples import PROX_KEY, REF_KEY
from shared.model.logprobs import Entropy
from shared.tensors_torch import to_device


class BatchLoss:
    """A `TokenLoss` over the samples of this data-parallel rank."""

    def __init__(
        self,
        spec: LossSpec,
        flat: dict[str, Array],
        advantages: Array,
        weights: Array,
        device: str,
        own: PolicyLoss | None = None,
        version: int = -1,
        *,
        keeps: bool = False,
    ) -> None:
        """`flat` holds the joined shards. `advantages` and `weights` are float [T]. For `version` see `token_loss`.
        `keeps` means that the log-probs of all tokens are kept for `kept_logprobs`.

        Raises RpcError(bad_request) if `spec` is not supported.
        """
        self._spec = spec
        self._version = version
        self._policy = losses.check(spec, own)
        self.entropy: Entropy = "gradient" if spec.entropy_coef else "value"
        """The form of entropy that the backend must compute in addition to log-probs."""
        lengths = flat["lengths"].astype(np.int64)
        self._count = len(lengths)
        arrays = [flat["rollout_logprobs"], flat["versions"], advantages, weights]
        arrays.append(np.repeat(np.arange(self._count), lengths))
        arrays += [flat[PROX_KEY]] if spec.anchor == "proximal" else []
        arrays += [flat[REF_KEY]] if spec.kl_estimator else []
        self._rollout, self._versions, self._advantages, self._weights, self._sequences, *more = to_device(
            arrays, torch.device(device)
        )
        self._prox: Tensor | None = more.pop(0) if spec.anchor == "proximal" else None
        self._ref: Tensor | None = more.pop(0) if spec.kl_estimator else None
        self._kept = torch.zeros(len(flat["loss_mask"]), device=device) if keeps else None

    def __call__(self, local: LocalScores) -> tuple[Tensor, dict[str, Tensor]]:
        at, cur, entropy = local.scores.tokens, local.scores.outputs, local.scores.entropy
        if self._kept is not None:
            self._kept[at] = cur.detach().float()
        data = TokenData(
            rollout=self._rollout[at],
            advantages=self._advantages[at],
            weights=self._weights[at],
            versions=self._versions[at],
            prox=None if self._prox is None else self._prox[at],
            ref=None if self._ref is None else self._ref[at],
            sequences=self._sequences[at],
            sequence_count=self._count,
            add_up=local.sum_over_sequence_ranks,
        )
        known = torch.zeros_like(cur) if entropy is None else entropy
        return losses.token_loss(self._spec, cur, data, known, self._policy, version=self._version)

    def kept_logprobs(self) -> Array:
        """Return float32 [T]: the log-probs that the pass computed on this rank, and 0 for all other tokens."""
        kept: Array = np.zeros(len(self._weights), np.float32) if self._kept is None else self._kept.cpu().numpy()
        return kept
