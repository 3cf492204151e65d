"""The tokens of finished samples (`Made`), however they were made, and the policy version that sampled each token.

Versions are never guessed: unproved weights have no version, and neither do their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from proto.messages import LossReason
from proto.tensors import Array
from services.rollout.engine import FinishReason, Generation
from services.rollout.rewards.score import LIMIT, Score
from shared.sample import Sample
from shared.stages import ROUTES


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

    @property
    def newest(self) -> int:
        """The newest version with which the lease is sampled."""
        return max(self._steps.values())

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
    routes: Array | None = None
    """Those of the prompt and the completion, as in `Generation`."""


def answers_of(groups: Sequence[Sequence[Generation]], versions: BlockVersions) -> list[list[Completion]]:
    """Return an engine's generations as completions, with the policy version of each token."""
    swaps = [answer.swaps for group in groups for answer in group]
    steps = versions.of(np.concatenate(swaps))  # one call, because for short answers a call costs more than its work
    ends = accumulate(len(counts) for counts in swaps)
    of_answer = (steps[end - len(counts) : end] for counts, end in zip(swaps, ends, strict=True))
    return [
        [
            Completion(answer.token_ids, answer.logprobs, next(of_answer), answer.finish_reason, answer.routes)
            for answer in group
        ]
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

    It has no sequences if it failed. `truncated` says whether its last answer reached the length limit. `turns` lists
    the last token of each turn, (sequence, position), and is empty for a single answer. `turn_rewards` has one array
    per sequence, float32 [N], if the workflow gives rewards to turns or tokens.
    """

    sequences: list[SequenceTokens]
    truncated: bool
    sample: Sample
    score: Score | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[Array] = field(default_factory=list)
    read: Array | None = None
    """The text as tokens of the reward model, int32, if there is one."""


def with_turn_rewards(made: Made, score: Score, *, per_token: bool) -> tuple[Made, Score]:
    """Return the sample and its score with the rewards of its turns, which the workflow and the functions give.

    They are added to the reward of the sample. With `per_token`, they are also the key `turn_rewards` of its sequences.
    The score fails if a function gave rewards for another number of turns.
    """
    if score.value is None or not (made.turn_rewards or score.turns or per_token):
        return made, score
    ends = made.turns or [(0, len(made.sequences[0].token_ids) - 1)]
    if score.turns and len(score.turns) != len(ends):
        why = f"{len(score.turns)} turn rewards for {len(ends)} turns; give one number for each answer of the policy"
        return made, Score(None, why, kind=LossReason.ANSWER)
    arrays = [array.copy() for array in made.turn_rewards] or [
        np.zeros(len(sequence.token_ids), np.float32) for sequence in made.sequences
    ]
    value = score.value + sum(float(array.sum(dtype=np.float64)) for array in made.turn_rewards)
    if not abs(value) <= LIMIT:
        why = f"the reward with those of its turns is {value:.3g}, which is not finite in float32"
        return made, Score(None, why, kind=LossReason.ANSWER)
    for (sequence, position), reward in zip(ends, score.turns, strict=False):
        arrays[sequence][position] += reward
    if per_token:
        tokens = [
            replace(sequence, others={**sequence.others, "turn_rewards": array})
            for sequence, array in zip(made.sequences, arrays, strict=True)
        ]
        made = replace(made, sequences=tokens)
    return made, replace(score, value=value)


def at_end(sequence: SequenceTokens) -> SequenceTokens:
    """Return the sequence as a value head learns from it: with one more token, which alone is trained.

    The output for a token depends on the tokens before it, so that for the added one is the value of the whole
    sequence. Its id does not matter.
    """
    last = sequence.token_ids[-1:]
    return SequenceTokens(
        np.concatenate((sequence.token_ids, last)),
        np.concatenate((np.zeros_like(sequence.loss_mask), np.ones(1, np.uint8))),
        np.zeros(len(sequence.token_ids) + 1, np.float32),
        np.concatenate((np.full_like(sequence.versions, -1), sequence.versions[-1:])),
    )


def single_turns(
    prompt_ids: Sequence[int], answers: Sequence[Completion], trained: Sequence[Array] | None = None
) -> list[list[SequenceTokens]]:
    """Return the sequence of each sample of a single turn: the prompt, followed by the sampled tokens. `trained`, bool
    [N] for each answer, tells which of these are trained on; None: all."""
    given = len(prompt_ids)
    prompt = np.array(prompt_ids, np.int32)
    not_sampled, no_logprobs = np.zeros(given, np.uint8), np.zeros(given, np.float32)
    no_versions = np.full(given, -1, np.int32)
    masks = [np.ones(len(answer.token_ids), np.uint8) for answer in answers]
    if trained is not None:
        masks = [mask.astype(np.uint8) for mask in trained]
    return [
        [
            SequenceTokens(
                np.concatenate((prompt, answer.token_ids)),
                np.concatenate((not_sampled, mask)),
                np.concatenate((no_logprobs, answer.logprobs)),
                np.concatenate((no_versions, np.where(mask == 1, answer.versions, np.int32(-1)))),
                {} if answer.routes is None else {ROUTES: answer.routes},
            )
        ]
        for answer, mask in zip(answers, masks, strict=True)
    ]
