"""The interface of inference engines. It neither names a particular engine nor imports torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np

from proto.messages import WeightsKind
from proto.tensors import Array
from shared.colocation.devices import Parts

T = TypeVar("T")
FULL_ONLY = frozenset({WeightsKind.FULL})
"""The kinds of versions that an engine without adapters loads."""
ADAPTER_ONLY = frozenset({WeightsKind.ADAPTER})
"""The kinds of versions that an engine with adapters loads. Its other weights never change."""
BASE = -1
"""The value of `SamplingParams.swaps` that names the weights under the adapters of an engine with adapters."""


class GenerationCancelled(Exception):
    """The block was abandoned between two decode steps because its `cancel` event was set."""


class WeightsMismatch(Exception):
    """The weights do not fit the engine's model. The message is one line that names the parameters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to complete.

    `name` (the task id) and the run's seed determine the random numbers, except in vLLM on a GPU. `token_ids` is never
    empty. `resumed_ids` holds tokens of the completion that were sampled earlier. Generation continues after these
    tokens and does not return them. They count towards the block's `max_new_tokens`, and their number is always below
    that limit.
    """

    name: str
    token_ids: Sequence[int]
    resumed_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings for a block. Training samples from softmax(logits / temperature) without truncation.

    `samples` is the number of samples per prompt; `temperature` 0 is greedy; `max_new_tokens` includes the sampled
    EOS; `stop` lists texts that end a completion; `block_rows` is the minimum number of rows to run, some of which may
    be padding (0: one row per sample). `swaps` names the weights to sample with by the value that `Engine.swaps` had
    when they were current (None: the current ones). It counts only for an engine that retains weights.

    The other fields are for direct requests (`services.rollout.direct`), never for training, because their log-probs
    would not be those of the policy. Tokens are sampled from the `top_k` likeliest ones (0: all), and of these from the
    smallest set of likeliest ones whose probability reaches `top_p`. `stop_ids` are tokens that end a completion;
    unless `ends` is true, the model's own EOS tokens do not. With `seeded`, the seed counts in vLLM on a GPU, too.
    """

    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    block_rows: int = 0
    swaps: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    ends: bool = True
    seeded: bool = False

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class FinishReason(StrEnum):
    """The reason why a completion ended: an EOS token or stop text, or the token limit."""

    STOP = "stop"
    LENGTH = "length"
    UNFINISHED = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled continuation.

    `token_ids` int32 [N] includes the sampled EOS; `logprobs` float32 [N] are those of the distribution that was
    sampled from (at temperature 1 when greedy); `swaps` int32 [N] is the value of `Engine.swaps` when each token was
    sampled, or `BASE`. An engine that records routes gives those of the prompt and the completion, uint8 [P + N, W]
    (`shared.model.routing.Routers.packed`); the last token has none, which is 0.
    """

    token_ids: Array
    logprobs: Array
    finish_reason: FinishReason
    swaps: Array
    routes: Array | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs at temperature 1 of the T - 1 tokens of a prompt after the first.

    `logprobs` float32 [T - 1]; `top_ids` int32 and `top_logprobs` float32, both [T - 1, k], are the k likeliest tokens
    at each place, the likeliest first. `target_logprobs` float32 [T - 1, K] are those of the tokens that were asked
    for, and 0 where none was.
    """

    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    target_logprobs: Array


def no_targets(token_ids: Array) -> Array:
    """Return the targets of a score that asks for none."""
    return np.zeros((max(len(token_ids) - 1, 0), 0), np.int32)


@dataclass(frozen=True, slots=True)
class GenerationWatch:
    """Asks an engine for the state of a block every `every_s` seconds, and once more when the block is cancelled.

    `note(groups)` receives the generations so far for all prompts; some may be UNFINISHED. It is called on the
    engine's compute thread, so it must be quick and must not raise.
    """

    every_s: float
    note: Callable[[list[list[Generation]]], None]


class Engine(Protocol):
    """An inference engine. Its coroutines run on the service's loop; heavy work runs elsewhere, in sequence."""

    @property
    def progress(self) -> int:
        """Counter that only the computing side advances, at least once per decode step."""

    @property
    def swaps(self) -> int:
        """Number of times that the weights have been replaced since the start. Nothing else advances it."""

    @property
    def loads(self) -> frozenset[WeightsKind]:
        """The kinds of versions that the engine can load."""

    @property
    def side_by_side(self) -> bool:
        """Whether overlapping calls to `generate` are processed together rather than one after another."""

    @property
    def scores_alone(self) -> bool:
        """Whether nothing may be sampled while a version or a prompt is scored."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Maximum length of prompt plus completion, in tokens."""

    async def start(self) -> None:
        """Load the weights from the model directory."""

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None = None,
    ) -> list[list[Generation]]:
        """Return `sampling.samples` generations for each prompt. Raises GenerationCancelled once `cancel` is set.

        Calls may overlap (see `side_by_side`).

        The openai engine supports neither `watch` nor `resumed_ids` (`services.rollout.partial_s`). The vllm engine
        finds a stop text only within the tokens that it samples itself, and misses one that begins in `resumed_ids`.
        """

    async def base_weights(self) -> dict[str, Array]:
        """Return the tensors of the version with which the engine starts, by name, copying only what must be copied.

        They are the weights of the model directory or, for an engine with adapters, those of the first adapter.
        """

    async def prove_base(self, announced: Sequence[int]) -> None:
        """Prove that the weights under the adapter have the `announced` digests, which are in the order of the sorted
        names. Only an engine with adapters can be asked. Raises WeightsMismatch, which names the parameters."""

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` where the engine computes, and return its result. `work` counts as progress. Call this only
        between blocks."""

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace every parameter. `verify` checks whether the replacement worked.

        Raises WeightsMismatch, before any parameter is changed, if names, shapes or types differ.

        An engine may keep the arrays as its parameters until the next call, so the caller must not write to them.
        """

    def retain(self, swaps: Collection[int]) -> bool:
        """Keep the weights that were current after these `swaps` for the calls that name them, until the next call.

        Return False if the engine has no room for them beside new weights. An engine with a single place for weights
        can retain none.
        """

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        """Prove that the parameters that forward passes now use are bit-identical to those last set or received.

        `given` contains the arrays passed to `set_weights`, and is empty if the engine received the weights itself.
        `announced` contains the trainer's digests by name (`shared.weights.digests`), and is empty if there are none.
        At least one of the two is not empty. Raises WeightsMismatch, which names the parameters.
        """

    async def score(self, token_ids: Array) -> Array:
        """Return the log-probs at temperature 1, float32 [T - 1], of int32 `token_ids` [T] from the second token on."""

    async def score_prompt(self, token_ids: Array, swaps: int, top: int, targets: Array) -> PromptScores:
        """Return the scores of int32 `token_ids` [T] with weights that the engine retains, named as in
        `SamplingParams.swaps`, the `top` likeliest tokens of every place, and the scores of int32 `targets` [T - 1, K]
        in the places of the tokens after the first; -1 is no token. Call this between any two steps.

        Raises RpcError(bad_request) if `targets` has more tokens than the engine can score.
        """

    async def sleep(self) -> None:
        """Release all memory used for weights, keys and values. Call this only between blocks; nothing works until
        `wake` is called."""

    async def wake(self, parts: Parts) -> None:
        """Allocate the memory for `engine.weights`, `engine.kv_cache` or both. Parts that are already allocated stay
        allocated.

        Sleeping discards the weights, so generating and scoring require a new call to `set_weights`, before which an
        engine with adapters must prove its base again. Wake the keys and values after the weights have been set;
        scoring may need both parts.
        """

    async def pause(self) -> None:
        """Pause generation before its next decode step, so that weights can be set and scored in the middle of a block.

        Scoring may advance the block's samples with the weights that are being scored, but no sample is returned.
        """

    async def resume(self) -> None:
        """Continue generation after `pause`."""

    def stats(self) -> dict[str, float]:
        """Return totals since the start: `generated_tokens`, `decode_steps`, `generate_s`."""

    async def stop(self) -> None:
        """Abandon running generations and stop the engine's thread, within a bounded time."""
