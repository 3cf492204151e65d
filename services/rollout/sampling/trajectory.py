"""The tokens of finished samples (`Made`), however they were made, and the policy version that sampled each token.

Versions are never guessed: unproved weights have no version, and neither do their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from proto.tensors import Array
from services.rollout.engine import FinishReason, Generation
from services.rollout.rewards.score import Score
from shared.sample import Sample


class BlockVersions:
    """The versions with which one lease is sampled. Versions are added on the service's loop and read on any thread.

    Engines count how often their weights have been replaced since they started (`Engine.swaps`) and report the count
    for each token, so it does not matter when a block of the lease began, as long as this object existed by then.
    """

    def __init__(self, step: int, swaps: int, lineage: int = 0) -> None:
        """Start with the proved version `step` of `lineage`, which the engine holds after `swaps` swaps."""
        self.began = swaps
        self.first = step
        """The version that the engine held when sampling for the lease began."""
        self.lineage = lineage
        self._steps = {swaps: step}

    def replaced(self, step: int, swaps: int) -> None:
        """Record that the engine holds the proved version `step` after `swaps` swaps."""
        self._steps[swaps] = step

    def of(self, swaps: Array) -> Array:
        """Return the version of each token, int32 [N], given int32 `swaps` [N].

        Raises ValueError for a token that was sampled with earlier weights or with weights that have not been proved.
        """
        counts = np.fromiter(self._steps, np.int32)
        at = np.minimum(counts.searchsorted(swaps), len(counts) - 1)
        if (counts[at] != swaps).any():
            raise ValueError(
                f"tokens were sampled after {int(swaps.min())} to {int(swaps.max())} swaps of the engine's weights, "
                f"but the versions are known only for swap counts {', '.join(map(str, self._steps))}"
            )
        steps: Array = np.fromiter(self._steps.values(), np.int32)[at]
        return steps


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion so far. `token_ids` int32 [N]; `logprobs` float32 [N]; `versions` int32 [N], the policy version that
    sampled each token."""

    token_ids: Array
    logprobs: Array
    versions: Array
    finish_reason: FinishReason


def answers_of(groups: Sequence[Sequence[Generation]], versions: BlockVersions) -> list[list[Completion]]:
    """Return an engine's generations as completions, with the policy version of each token."""
    swaps = [answer.swaps for group in groups for answer in group]
    steps = versions.of(np.concatenate(swaps))  # one call, because for short answers a call costs more than its work
    ends = accumulate(len(counts) for counts in swaps)
    of_answer = (steps[end - len(counts) : end] for counts, end in zip(swaps, ends, strict=True))
    return [
        [Completion(answer.token_ids, answer.logprobs, next(of_answer), answer.finish_reason) for answer in group]
        for group in groups
    ]


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


@dataclass(frozen=True)
class Made:
    """One finished sample: its tokens, the `sample` for reward functions, and the workflow's own score, if any.

    It has no sequences if it failed. `truncated` says whether its last answer reached the length limit.
    """

    sequences: list[SequenceTokens]
    truncated: bool
    sample: Sample
    score: Score | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def single_turns(prompt_ids: Sequence[int], answers: Sequence[Completion]) -> list[list[SequenceTokens]]:
    """Return the sequence of each sample of a single turn: the prompt, followed by the sampled tokens."""
    given = len(prompt_ids)
    prompt = np.array(prompt_ids, np.int32)
    not_sampled, no_logprobs = np.zeros(given, np.uint8), np.zeros(given, np.float32)
    no_versions = np.full(given, -1, np.int32)
    return [
        [
            SequenceTokens(
                np.concatenate((prompt, answer.token_ids)),
                np.concatenate((not_sampled, np.ones(len(answer.token_ids), np.uint8))),
                np.concatenate((no_logprobs, answer.logprobs)),
                np.concatenate((no_versions, answer.versions)),
            )
        ]
        for answer in answers
    ]
