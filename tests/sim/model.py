"""The model of simulated runs: arithmetic that can be checked exactly, behind the interfaces of the real backends.

The weights are one 64-bit number: a chain of digests over all tokens that were ever trained on, the numbers that their
losses read, and their steps. Equal numbers mean equal histories. Samples are digests of the weights and the task, so
sampling a task again with the same version gives bit-identical results. The training state also lists the tasks that
were applied, in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xxhash
from torch import nn

from proto.ids import make_task_id, split_task_id
from proto.messages import AdamW, Canary, LeaseGrant
from services.policy_trainer.worker.backend import Backend, PartShelves, Sequences
from services.policy_trainer.worker.devices import device_parts
from services.policy_trainer.worker.slots import Slots
from services.policy_trainer.worker.training_state import TrainingState
from services.rollout.engine import (
    FULL_ONLY,
    FinishReason,
    Generation,
    GenerationCancelled,
    GenerationWatch,
    Prompt,
    SamplingParams,
    WeightsMismatch,
)
from services.rollout.rewards.score import Score
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from shared.colocation.devices import ENGINE, NOTHING, WEIGHTS, Parts
from shared.stages import TRAIN
from shared.topology.models import TrainedModel
from shared.weights.weight_set import Base, WeightSet

if TYPE_CHECKING:
    from tests.sim.world import World

Array = Any
NAME = "chain"
BEGINNING = 7
ROWS = 10_000
"""Number of rows. A prompt is one token: epoch * ROWS + index."""
VOCABULARY = 1 << 30
MOST_APPLIED = 1024
"""Maximum number of tasks that a simulated run trains on."""
CANARY_TOKENS = np.arange(4, dtype=np.int32)


def digest(*parts: int | str | bytes) -> int:
    """Return 62 bits that depend on all parts."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) >> 2


def number_of(task_id: str) -> int:
    _, epoch, index = split_task_id(task_id)
    return epoch * ROWS + index


def task_of(number: int) -> str:
    return make_task_id(TRAIN, number // ROWS, number % ROWS)


def scores_of(chain: int, count: int) -> Array:
    """Return float32 [count]: the log-probs of a canary under some weights."""
    return np.array([-(digest(chain, at) % 4096) / 4096 for at in range(count)], np.float32)


class SimBackend:
    """A rank's backend. Gradients are sums of digests, so they do not depend on how a batch is divided."""

    def __init__(self, world: World, model: TrainedModel, place: Any, generation: int) -> None:
        self.place = place
        self.base: Base | None = None
        self.slots: Slots | None = None
        self.name = model.name
        self.called = nn.Module()
        self.shelves = cast(PartShelves, SimpleNamespace(offload=self._offload, backload=self._backload))
        self.parameters = 1
        self.vocab_size = VOCABULARY
        self._world = world
        self._ranks = place.layout.world_size
        self._group: dict[tuple[int, int], tuple[int, list[int]]] = world.groups.setdefault(generation, {})
        """Gradients that the ranks of a group exchange in collectives, by (updates so far, rank)."""
        world.members.setdefault(generation, {})[place.rank] = world.current()
        self._generation = generation
        self._there, self._away = {"parameters"}, set[str]()
        self.restart()

    def _offload(self, parts: Iterable[str]) -> int:
        moved = self._there & set(parts)
        self._away |= moved
        self._there -= moved
        self._world.holds(device_parts(self.name, cast(Any, frozenset(self._there))))
        return len(moved)

    def _backload(self, parts: Iterable[str]) -> int:
        moved = self._away & set(parts)
        self._away -= moved
        self._use(*moved)
        return len(moved)

    def _use(self, *parts: str) -> None:
        """Check that none of `parts` is off the device, and note that they are on the device from now on."""
        away = self._away & set(parts)
        self._world.check(not away, f"a call uses {', '.join(sorted(away))}, which are off the device")
        self._there |= set(parts)
        self._world.holds(device_parts(self.name, cast(Any, frozenset(self._there))))

    def fill_moments(self) -> None:
        raise AssertionError("a simulated backend has no slots")

    def restart(self) -> None:
        self._use("parameters")
        self.chain, self.updates, self.applied = BEGINNING, 0, list[int]()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._group[self.updates, self.place.rank] = (0, [])
        self._there -= {"gradients"}

    def forward(self, sequences: Sequences, temperature: float) -> Array:
        self._use("parameters")
        return np.array([-(digest(self.chain, int(token)) % 4096) / 4096 for token in sequences.token_ids], np.float32)

    def forward_backward(
        self,
        sequences: Sequences,
        temperature: float,
        loss: Any,
        *,
        entropy: Any,
        others: Any = None,
        backward: bool = True,
    ) -> dict[str, float]:
        assert backward
        self._use("parameters", "gradients")
        total, numbers = self._group[self.updates, self.place.rank]
        first = 0
        tasks: dict[int, None] = {}
        read = [loss._tokens.advantages, *(shard for _, shard in sorted(loss._tokens.shards.items()))]
        for length in sequences.lengths.tolist():
            tokens = sequences.token_ids[first : first + length].tolist()
            numbers_read = [each[first : first + length].numpy().tobytes() for each in read]
            first += length
            total = (total + digest(self.chain, *tokens, *numbers_read)) % (1 << 62)
            tasks[tokens[0]] = None
        self._group[self.updates, self.place.rank] = (total, [*numbers, *tasks])
        return {"tokens": float(first)}

    def step(self, step: int, optimizer: AdamW) -> float:
        self._use("parameters", "gradients", "optimizer")
        self._need_all()
        parts = [self._group[self.updates, rank] for rank in range(self._ranks)]
        numbers = sorted(number for _, each in parts for number in each)
        again = set(numbers) & set(self.applied)
        names = ", ".join(map(task_of, sorted(again)))
        self._world.check(not again, f"promise 2: {names} affects the weights a second time")
        self._world.check(len(set(numbers)) == len(numbers), "promise 2: a task appears twice in one update")
        self.chain = digest(self.chain, sum(total for total, _ in parts) % (1 << 62), step)
        self.applied = [*self.applied, *numbers]
        self.updates += 1
        self.drop_gradients()
        return 1.0

    def _need_all(self) -> None:
        """Fail as a collective does when a rank of the group has died."""
        members = self._world.members[self._generation]
        if not all(members[rank].alive for rank in range(self._ranks)):
            raise RuntimeError("connection closed by peer")

    def weights(self) -> dict[str, torch.Tensor]:
        self._use("parameters")
        return {NAME: torch.tensor([self.chain])} if self.place.rank == 0 else {}

    def published(self) -> dict[str, torch.Tensor]:
        return self.weights()

    def state(self) -> TrainingState:
        self._use("parameters", "optimizer")
        if self.place.rank:
            return TrainingState({}, {})
        return TrainingState(self.weights(), {"applied": torch.tensor([self.updates, *self.applied])})

    def load_state(self, state: TrainingState) -> None:
        self._use("parameters", "optimizer")
        self.chain = int(state.weights[NAME][0])
        self.updates, *self.applied = state.optimizer["applied"].tolist()
        self.drop_gradients()

    def own_state(self) -> dict[str, torch.Tensor]:
        self._use("parameters", "optimizer")
        room = torch.zeros(MOST_APPLIED, dtype=torch.int64)  # Every snapshot of a rank has the same size.
        room[: len(self.applied)] = torch.tensor(self.applied, dtype=torch.int64)
        return {NAME: torch.tensor([self.chain, self.updates, len(self.applied)]), "applied": room}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._use("parameters", "optimizer")
        self.chain, self.updates, count = state[NAME].tolist()
        self.applied = state["applied"][:count].tolist()
        self.drop_gradients()

    def export(self, folder: Path) -> None:
        if self.place.rank == 0:
            folder.mkdir(exist_ok=True)
            (folder / NAME).write_text(f"{self.chain} {','.join(map(str, self.applied))}")


def make_backend(world: World, model: TrainedModel, place: Any, generation: int) -> Backend:
    """Return a `SimBackend` as a `Backend`, so that a member that it lacks is a type error."""
    return SimBackend(world, model, place, generation)


class SimCanaries:
    """The canaries of a simulated run. Integers cannot be perturbed, so the drill is the first version itself."""

    drill_seed = 1
    drill_factors: tuple[float, ...] = ()

    def __init__(self, backend: SimBackend, *_: Any, **__: Any) -> None:
        self._backend = backend
        self.drill = self.of(scores_of(BEGINNING, len(CANARY_TOKENS) - 1))
        self.drill_factors = []  # type: ignore[assignment]

    def current(self) -> Canary:
        return self.of(scores_of(self._backend.chain, len(CANARY_TOKENS) - 1))

    def of(self, logprobs: Array) -> Canary:
        return Canary(token_ids=CANARY_TOKENS, logprobs=logprobs, tolerance=1e-6)

    def weight_set(self, weights: dict[str, torch.Tensor]) -> WeightSet:
        return WeightSet.of(weights)


class SimEngine:
    """An inference engine whose samples are digests of its weights and the task."""

    side_by_side = False
    loads = FULL_ONLY
    vocab_size = VOCABULARY
    context_tokens = 64

    def __init__(self, world: World) -> None:
        self.progress = self.swaps = 0
        self._world = world
        self._chain = BEGINNING
        self._awake: Parts = NOTHING

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        cancel: threading.Event,
        watch: GenerationWatch | None = None,
    ) -> list[list[Generation]]:
        made: list[list[Generation]] = []
        for prompt in prompts:
            self._use(ENGINE)
            await self._world.compute()
            if cancel.is_set():
                raise GenerationCancelled("the lease was lost")
            self.progress += 1
            number = prompt.token_ids[0]
            tokens = [digest(self._chain, number, sample) % VOCABULARY for sample in range(sampling.samples)]
            made.append([self._generation(token) for token in tokens])
        return made

    def _generation(self, token: int) -> Generation:
        return Generation(
            np.array([token], np.int32),
            np.array([-1.0], np.float32),
            FinishReason.STOP,
            np.array([self.swaps], np.int32),
        )

    async def base_weights(self) -> dict[str, Array]:
        return {NAME: np.array([self._chain])}

    async def compute(self, work: Callable[[], Any]) -> Any:
        self.progress += 1
        return work()

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        self._use(frozenset({WEIGHTS}))
        self._chain = int(weights[NAME][0])
        self.swaps += 1

    def retain(self, swaps: Collection[int]) -> bool:
        return not swaps

    async def verify(self, given: Mapping[str, Array], announced: Mapping[str, int]) -> None:
        if int(given[NAME][0]) != self._chain:
            raise WeightsMismatch("the engine has different weights")

    async def score(self, token_ids: Array) -> Array:
        return scores_of(self._chain, len(token_ids) - 1)

    async def sleep(self) -> None:
        self._awake = NOTHING
        self._world.holds(self._awake)

    async def wake(self, parts: Parts) -> None:
        self._awake |= parts
        self._world.holds(self._awake)

    def _use(self, parts: Parts) -> None:
        self._world.check(parts <= self._awake, f"the engine computes without {', '.join(sorted(parts - self._awake))}")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


class SimTasks:
    """Replacement for the data sets, in which the prompt of a task is the task's number."""

    def prepare(self, grant: LeaseGrant) -> PreparedTasks:
        sampling = SamplingParams(
            samples=grant.group_size,
            temperature=1.0,
            max_new_tokens=1,
            seed=0,
            stop=(),
            block_rows=grant.block_rows,
        )
        ready = [ReadyTask(task, {"prompt": ""}, [number_of(task.task_id)]) for task in grant.batch.tasks]
        return PreparedTasks(ready, [], sampling, min(2, grant.group_size) if grant.split == TRAIN else 1)


class SimPrompts:
    """Replacement for the tokenizer."""

    def completion(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        return ""


class SimRewards:
    """Replacement for the reward processes."""

    def __init__(self, world: World) -> None:
        self.reachable = asyncio.Event()
        self.reachable.set()
        self._world = world

    async def score(self, groups: Sequence[Sequence[Any]], advance: Callable[[], None]) -> list[list[Score]]:
        await self._world.compute()
        advance()
        return [[Score(float(each.token_ids[0] % 7 + at)) for at, each in enumerate(group)] for group in groups]

    def troubles(self) -> list[Any]:
        return []


def export(backend: Backend, source: Path, target: Path) -> None:
    """Write the final weights."""
    backend.export(target)
