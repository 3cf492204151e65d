"""Binds the loss to one mini-batch: looks up each micro-batch's tokens in the flat arrays of the mini-batch.

This module combines a backend's log-probs with advantages, weights and the shards that the loss reads.
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
from services.policy_trainer.worker.samples import SCORE_KEYS, loss_keys
from shared.model.logprobs import Entropy
from shared.stages import Per
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
        # The model's inputs are not copied: the backend has put them on the device.
        names = [key.name for key in loss_keys(spec) if key.per is Per.TOKEN and key.name not in SCORE_KEYS]
        arrays = [advantages, weights, np.repeat(np.arange(len(lengths)), lengths), *(flat[name] for name in names)]
        own_advantages, own_weights, sequences, *shards = to_device(arrays, torch.device(device))
        self._tokens = TokenData(
            shards=dict(zip(names, shards, strict=True)),
            advantages=own_advantages,
            weights=own_weights,
            sequences=sequences,
            sequence_count=len(lengths),
        )
        self._kept = torch.zeros(len(flat["loss_mask"]), device=device) if keeps else None

    def __call__(self, local: LocalScores) -> tuple[Tensor, dict[str, Tensor]]:
        at, cur, entropy = local.scores.tokens, local.scores.logprobs, local.scores.entropy
        if self._kept is not None:
            self._kept[at] = cur.detach().float()
        data = self._tokens.at(at, local.sum_over_sequence_ranks)
        value = torch.zeros_like(cur) if entropy is None else entropy
        return losses.token_loss(self._spec, cur, data, value, self._policy, version=self._version)

    def kept_logprobs(self) -> Array:
        """Return float32 [T]: the log-probs that the pass computed on this rank, and 0 for all other tokens."""
        size = len(self._tokens.weights)
        kept: Array = np.zeros(size, np.float32) if self._kept is None else self._kept.cpu().numpy()
        return kept
