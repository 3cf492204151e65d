"""The tokens of one finished sample (`Rolled`), however it was made, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proto.tensors import Array
from services.rollout.engine import FinishReason
from services.rollout.partial import Completion


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """One sequence of N tokens: `token_ids` int32, `loss_mask` uint8 (1: sampled by the policy), `logprobs` float32
    (0 where not sampled), `versions` int32 (-1 where not sampled), each [N]."""

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array


@dataclass(frozen=True, slots=True)
class Rolled:
    """A sample. It has no sequences if it failed. `truncated` says whether its last answer reached the length limit."""

    sequences: list[SequenceTokens]
    truncated: bool

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(int(each.loss_mask.sum()) for each in self.sequences)

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest policy version that sampled a token."""
        each = np.concatenate([each.versions[each.loss_mask == 1] for each in self.sequences])
        return int(each.min()), int(each.max())


def rolled(prompt_ids: Sequence[int], answer: Completion) -> Rolled:
    """Return the sample of a single turn: the prompt, followed by the sampled tokens."""
    before, after = len(prompt_ids), len(answer.token_ids)
    token_ids = np.empty(before + after, np.int32)
    token_ids[:before] = prompt_ids
    token_ids[before:] = answer.token_ids
    loss_mask = np.zeros(before + after, np.uint8)
    loss_mask[before:] = 1
    logprobs = np.zeros(before + after, np.float32)
    logprobs[before:] = answer.logprobs
    versions = np.full(before + after, -1, np.int32)
    versions[before:] = answer.versions
    tokens = SequenceTokens(token_ids, loss_mask, logprobs, versions)
    return Rolled([tokens], truncated=answer.finish_reason == FinishReason.LENGTH)
