"""The tokens of one finished sample (`Rolled`), however it was made, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from proto.tensors import Array
from services.rollout.engine import FinishReason
from services.rollout.sampling.partial import Completion


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """One sequence of N tokens: `token_ids` int32, `loss_mask` uint8 (1: sampled by the policy), `logprobs` float32
    (0 where not sampled), `versions` int32 (-1 where not sampled), each [N].

    `others` holds the arrays of further keys that the rollout stage declares per token (`shared.stages`).
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    others: Mapping[str, Array] = field(default_factory=dict)

    def by_key(self) -> dict[str, Array]:
        """Return all arrays by key."""
        return {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "rollout_logprobs": self.logprobs,
            "versions": self.versions,
            **self.others,
        }


@dataclass(frozen=True, slots=True)
class Rolled:
    """A sample. It has no sequences if it failed. `truncated` says whether its last answer reached the length limit."""

    sequences: list[SequenceTokens]
    truncated: bool


def single_turns(prompt_ids: Sequence[int], answers: Sequence[Completion]) -> list[Rolled]:
    """Return samples of a single turn: the prompt, followed by the sampled tokens."""
    given = len(prompt_ids)
    prompt = np.array(prompt_ids, np.int32)
    not_sampled, no_logprobs = np.zeros(given, np.uint8), np.zeros(given, np.float32)
    no_versions = np.full(given, -1, np.int32)
    return [
        Rolled(
            [
                SequenceTokens(
                    np.concatenate((prompt, answer.token_ids)),
                    np.concatenate((not_sampled, np.ones(len(answer.token_ids), np.uint8))),
                    np.concatenate((no_logprobs, answer.logprobs)),
                    np.concatenate((no_versions, answer.versions)),
                )
            ],
            truncated=answer.finish_reason == FinishReason.LENGTH,
        )
        for answer in answers
    ]
