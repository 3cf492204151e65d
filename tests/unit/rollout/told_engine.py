"""Provides an engine that has no model. Its token ids are the policy versions that sampled them. It is meant for tests
of the code around an engine, not for tests of engines.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from proto.messages import BatchMeta, Canary, WeightsRef
from proto.tensors import Array
from services.rollout.engine import FULL_ONLY, Generation, GenerationCancelled, GenerationWatch, Prompt, SamplingParams
from shared.colocation.devices import Parts
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.weights.drill import perturb
from tests.weights_refs import weights_ref

T = TypeVar("T")
DRILL_SEED = 3
CANARY = np.arange(4, dtype=np.int32)


async def _nothing(_: int) -> None:
    pass


def weights_of(step: int) -> dict[str, Array]:
    return {"w": np.array([step], np.float32)}


def ref_of(step: int, *, canary: float | None = None) -> WeightsRef:
    """Return a reference to version `step`, with the canary of version `canary` if it is given."""
    drilled = perturb("w", weights_of(0)["w"], DRILL_SEED)[0]
    return weights_ref(
        0, step, _canary(step if canary is None else canary), _canary(drilled), drill_seed=DRILL_SEED, nbytes=4
    )


def _canary(value: float) -> Canary:
    return Canary(token_ids=CANARY, logprobs=np.full(len(CANARY) - 1, value, np.float32), tolerance=1e-6)


class ToldWeights:
    """A data plane that holds every version's weights."""

    async def fetch(
        self, meta: BatchMeta, keys: Sequence[str], *, deadline_s: float, on_progress: OnProgress = ignore_progress
    ) -> list[dict[str, Array]]:
        return [weights_of(int(task.task_id.rpartition("/")[2])) for task in meta.tasks]


class ToldEngine:
    """An implementation of `services.rollout.engine.Engine` within one event loop."""

    def __init__(self) -> None:
        self.before_step: Callable[[int], Awaitable[None]] = _nothing
        """Function that is called before each step with the number of the step, counted from 1 over all blocks."""
        self.progress = 0
        self.swaps = 0
        self.steps = 0
        self.vocab_size, self.context_tokens = 100, 1000
        self.side_by_side = True
        self.loads = FULL_ONLY
        self._loaded = 0.0
        self._running = asyncio.Event()
        self._running.set()

    @property
    def is_held(self) -> bool:
        return not self._running.is_set()

    async def start(self) -> None: ...

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None = None,
    ) -> list[list[Generation]]:
        """Return samples of `max_new_tokens` tokens, and report each step to `watch`."""
        told: list[tuple[int, int]] = []
        longest = max(sampling.max_new_tokens - len(each.resumed_ids) for each in prompts)
        while len(told) < longest:
            self.steps += 1
            await self.before_step(self.steps)
            await self._running.wait()
            if cancel.is_set():
                raise GenerationCancelled("told to")
            told.append((int(self._loaded), self.swaps))
            self.progress += 1
            if watch is not None:
                watch.note(_generations(told, prompts, sampling))
        return _generations(told, prompts, sampling)

    async def base_weights(self) -> dict[str, Array]:
        return weights_of(0)

    async def compute(self, work: Callable[[], T]) -> T:
        self.progress += 1
        return work()

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        self._loaded = float(weights["w"][0])
        self.swaps += 1
        self.progress += 1

    def retain(self, swaps: Collection[int]) -> bool:
        return not swaps

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        """Accept any weights, because there are no parameters to verify."""

    async def score(self, token_ids: Array) -> Array:
        return np.full(len(token_ids) - 1, self._loaded, np.float32)

    async def sleep(self) -> None: ...

    async def wake(self, parts: Parts) -> None: ...

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    def stats(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None: ...


def _generations(
    told: Sequence[tuple[int, int]], prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[list[Generation]]:
    return [[_generation(told, sampling.max_new_tokens - len(each.resumed_ids))] * sampling.samples for each in prompts]


def _generation(told: Sequence[tuple[int, int]], limit: int) -> Generation:
    token_ids = np.array([version for version, _ in told[:limit]], np.int32)
    return Generation(
        token_ids,
        np.full(len(token_ids), -1.0, np.float32),
        "length" if len(token_ids) == limit else "",
        np.array([swaps for _, swaps in told[:limit]], np.int32),
    )
