"""What the rollout service needs of an inference engine. Must never name a particular engine or import torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from proto.tensors import Array
from shared.devices import Parts

T = TypeVar("T")


class GenerationCancelled(Exception):
    """The block was given up between two decode steps because its `cancel` event was set."""


class WeightsMismatch(Exception):
    """Weights that do not fit the engine's model. One line that names the parameters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`name` (the task id) and the run's seed decide the random numbers; `token_ids` is never empty.

    `said`: tokens of the completion that were sampled before. The generation goes on behind them and does not hold
    them; the block's `max_new_tokens` counts them, and there are fewer of them than that.
    """

    name: str
    token_ids: Sequence[int]
    said: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a block is sampled. Training samples from softmax(logits / temperature), nothing cut off.

    `samples` a prompt; `temperature` 0 is greedy; `max_new_tokens` counts the sampled EOS; `stop`: texts that end a
    completion; `block_rows`: rows to run at least, filled with padding, 0 for as many as there are samples.
    """

    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    block_rows: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled continuation.

    `token_ids` int32 [N], the sampled EOS included; `logprobs` float32 [N] at the sampling temperature (at
    temperature 1 when greedy); `finish_reason` is `stop` or `length`; `swaps` int32 [N]: `Engine.swaps` when the token
    was sampled.
    """

    token_ids: Array
    logprobs: Array
    finish_reason: str
    swaps: Array


@dataclass(frozen=True, slots=True)
class Watch:
    """Has an engine show what it has of a block every `every_s` seconds, and once more when the block is cancelled.

    `note(first, groups)`: the generations so far of the prompts from number `first` on, with finish_reason "" where one
    goes on. Called on the engine's compute thread: it must be quick and raise nothing.
    """

    every_s: float
    note: Callable[[int, list[list[Generation]]], None]


class Engine(Protocol):
    """An inference engine. Its coroutines belong to the service's loop; what is heavy runs elsewhere, one at a time."""

    @property
    def progress(self) -> int:
        """A counter that only the computing side advances: at least once a decode step."""

    @property
    def swaps(self) -> int:
        """How often the weights were set since the start; only `set_weights` advances it."""

    @property
    def side_by_side(self) -> bool:
        """Whether calls of `generate` that overlap are worked on together; otherwise one after the other."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus completion in tokens."""

    async def start(self) -> None:
        """Load the model directory's weights."""

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: Watch | None = None,
    ) -> list[list[Generation]]:
        """`sampling.samples` generations for each prompt. Raises GenerationCancelled once `cancel` is set.

        May be called while other calls are under way (`side_by_side`).

        `watch`, and `said` in a prompt, are not the openai engine's (`services.rollout.partial_s`); vllm finds a stop
        text only within what it samples itself, not where it begins in `said`.
        """

    async def base_weights(self) -> dict[str, Array]:
        """The weights now in the engine by parameter name; copies nothing that it need not copy."""

    async def compute(self, work: Callable[[], T]) -> T:
        """What `work` returns, done where the engine computes; it counts as progress. Between blocks only."""

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace every parameter; `verify` says whether that worked.

        Raises WeightsMismatch before any is touched when names, shapes or types differ.

        An engine may keep the arrays as its parameters until the next call: nobody must write to them any more.
        """

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        """Prove that the parameters which forward passes use now are those that were set or received last, to the bit.

        `given`: what `set_weights` was given, empty for weights that the engine received itself; `announced`: the
        trainer's digests by name (`shared.model.digests`), empty if it announced none. One of the two is there.
        Raises WeightsMismatch naming the parameters.
        """

    async def score(self, token_ids: Array) -> Array:
        """float32 [T - 1]: log-probs of int32 `token_ids` [T] from the second on, at temperature 1."""

    async def sleep(self) -> None:
        """Give all memory of weights, keys and values back. Between blocks only; nothing works until `wake`."""

    async def wake(self, parts: Parts) -> None:
        """Have memory again for `engine.weights` or `engine.kv_cache`, or both; what is there already stays.

        Weights that slept are lost: nothing may be generated or scored before `set_weights`. Keys and values come
        after the weights were set; scoring may need both.
        """

    async def pause(self) -> None:
        """Hold generation before its next decode step; weights can then be set and scored in the midst of a block.

        Its samples may move on while something is scored, with the weights that are scored, but none is returned.
        """

    async def resume(self) -> None:
        """Go on after `pause`."""

    def stats(self) -> dict[str, float]:
        """Totals since the start: `generated_tokens`, `decode_steps`, `generate_s`."""

    async def stop(self) -> None:
        """Give up what is being generated and end the engine's thread; bounded."""
