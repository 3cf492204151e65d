"""The frozen model on its compute thread.

Policy weights are used only after they have matched the trainer's canary. Lightweight processes do not import this
module.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from proto.messages import ErrorCode, WeightsRef
from proto.tensors import Array
from services.reference.frozen import Frozen
from shared.colocation.shelf import Shelf, own_storages
from shared.lease import LeaseLost
from shared.model import cpu
from shared.model.load import mismatched_weights, require_deterministic_algorithms
from shared.model.picks import Likeliest
from shared.rpc.errors import BadInput, RpcError
from shared.stages import REWARD_MODEL
from shared.topology.models import Head
from shared.weights.drill import canary_error

T = TypeVar("T")
UNKNOWN, BEGINNING = (-1, -1), (0, 0)


class FrozenScorer:
    """Computes log-probs under the frozen model. Its coroutines run on the service's loop."""

    def __init__(
        self,
        make: Callable[[], Frozen],
        *,
        source: Path,
        threads: int,
        temperature: float,
        deterministic: bool = False,
        scratch: Path | None = None,
        ranks: int = 1,
        likeliest: Likeliest | None = None,
        head: Head = "language",
    ) -> None:
        """`make` creates the model on the compute thread. `source` is the model's directory, named in error messages.

        `temperature` is the sampling temperature of training. If `deterministic` is true, the same tasks in the same
        order give bit-identical results. Weights that leave a GPU are moved to host memory, and weights that leave a
        CPU are moved to the file `scratch`. If `scratch` is None, the weights never leave the device. `ranks` is the
        number of ranks that share the model. With `likeliest`, it scores these tokens in place of the sampled ones.
        With a value `head`, it scores whole texts.
        """
        self._make = make
        self._source = source
        self._threads = threads
        self._temperature = temperature
        self._deterministic = deterministic
        self._alone = ranks == 1
        self._likeliest = likeliest
        self._head = head
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._made: list[Frozen] = []  # filled by `start`
        self._shelf = None if scratch is None else Shelf(scratch, "frozen")
        self.progress = 0
        """Progress counter. Only the compute thread advances it, once per micro-batch."""
        self.version = UNKNOWN
        """(lineage, step) of the weights. The weights in the model directory are (0, 0)."""

    async def start(self) -> None:
        """Load the weights from the model directory."""
        await self._on_compute(self._load)

    async def init_model(self, ref: WeightsRef | None = None, weights: Mapping[str, Array] | None = None) -> float:
        """Load `weights` (policy version `ref`, by Hugging Face name) or, by default, the model directory's weights.

        Returns the canary error, as `canary_error` computes it. Raises RpcError(conflict) if that error exceeds the
        tolerance, or if the names or shapes belong to another model. After this exception, the scorer holds no version.
        """
        if ref is None or weights is None:
            await self._on_compute(self._load)
            return 0.0
        return await self._on_compute(lambda: self._take(ref, weights))

    async def score(self, tasks: Sequence[dict[str, Array]], cancel: threading.Event) -> list[tuple[Array, ...]]:
        """Return each task's arrays: its log-probs, float32 [T], 0 where the mask is 0, or the results of
        `Frozen.likeliest`. All tasks are scored as one batch.

        Each task has `token_ids`, `lengths` and `loss_mask`. With a value head, it has `read_ids` and
        `read_lengths`, and its array is the value after the last token of each text, float32 [samples], which does not
        depend on the other tasks if the scorer is deterministic. Once `cancel` is set, raises LeaseLost at the next
        micro-batch or, if there are other ranks, at the end of the batch.
        """
        return await self._on_compute(lambda: self._score(tasks, cancel))

    async def leave(self) -> None:
        """Free the memory that the weights occupy. `come_back` restores the weights bit for bit."""
        await self._on_compute(self._leave)

    async def come_back(self) -> None:
        """Move the weights back to the memory where they are used."""
        if self._shelf is not None and self._shelf.holds:
            await self._on_compute(self._shelf.take)

    def stop(self) -> None:
        """Stop the thread after its current block."""
        if self._shelf is not None:
            self._shelf.remove()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _on_compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    @property
    def _model(self) -> Frozen:
        return self._made[0]

    def _load(self) -> None:
        cpu.set_up(self._threads)
        if self._deterministic:
            require_deterministic_algorithms()
        self.version = UNKNOWN
        if not self._made:
            self._made.append(self._make())
        self._model.load()
        if self._shelf is not None:
            # Like `come_back`, this gives the tensors storages of their own. Memory mapped from a file is aligned
            # differently, which changes the last bits of results.
            own_storages(self._model.tensors())
            self._shelf.renewed()
        self.version = BEGINNING
        self.progress += 1

    def _leave(self) -> None:
        if self._shelf is not None and self._made and not self._shelf.holds:
            self._shelf.put(self._model.tensors())

    def _take(self, ref: WeightsRef, weights: Mapping[str, Array]) -> float:
        self.version = UNKNOWN
        wrong = mismatched_weights(self._model.shapes, {name: array.shape for name, array in weights.items()})
        if wrong:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"reference: weights {ref.task_id} are not those of model {self._source}: {', '.join(wrong[:3])}",
            )
        self._model.take(weights)
        if self._shelf is not None:
            self._shelf.renewed()
        self.progress += 1
        tokens = ref.canary.token_ids
        mask = np.ones(len(tokens), np.uint8)
        mask[0] = 0
        logprobs = self._model.logprobs(tokens, np.array([len(tokens)]), mask, 1.0, self._count)
        error = canary_error(ref.canary.logprobs, logprobs[1:], ref.canary.quantile)
        if not error <= ref.canary.tolerance:  # so that a NaN counts as a mismatch
            raise RpcError(
                ErrorCode.CONFLICT,
                f"reference: canary mismatch after version {ref.step} of lineage {ref.lineage}: error {error:.3g} "
                f"exceeds the tolerance {ref.canary.tolerance:.3g}; nothing is scored with this version",
            )
        self.version = (ref.lineage, ref.step)
        self.progress += 1
        return error

    def _count(self) -> None:
        self.progress += 1

    def _score(self, tasks: Sequence[dict[str, Array]], cancel: threading.Event) -> list[tuple[Array, ...]]:
        if self._head == "value":
            return self._values(tasks, cancel)
        joined = {key: np.concatenate([task[key] for task in tasks]) for key in ("token_ids", "lengths", "loss_mask")}

        on_part = self._stopping(cancel)
        given = (joined["token_ids"], joined["lengths"], joined["loss_mask"], self._temperature)
        if self._likeliest is None:
            arrays: tuple[Array, ...] = (self._model.logprobs(*given, on_part),)
            sizes = [len(task["token_ids"]) for task in tasks]
        else:
            arrays = self._model.likeliest(*given, self._likeliest, on_part)
            sizes = [int(np.count_nonzero(task["loss_mask"])) for task in tasks]
        if cancel.is_set():
            raise LeaseLost("the block was abandoned while it was being scored")
        return list(zip(*(np.split(array, np.cumsum(sizes)[:-1]) for array in arrays), strict=True))

    def _values(self, tasks: Sequence[dict[str, Array]], cancel: threading.Event) -> list[tuple[Array, ...]]:
        """Return the value of each text. It is the output at a token that is added to the text. Raises BadInput if one
        is not finite, and LeaseLost."""
        made: list[Array] = []
        for batch in [[task] for task in tasks] if self._deterministic else [tasks]:
            tokens, lengths = (np.concatenate([task[key] for task in batch]) for key in REWARD_MODEL.needs)
            after = np.cumsum(lengths)
            mask = np.insert(np.zeros(len(tokens), np.uint8), after, 1)
            outputs = self._model.logprobs(np.insert(tokens, after, 0), lengths + 1, mask, 1.0, self._stopping(cancel))
            made.append(outputs[mask == 1])
        values = np.concatenate(made)
        if cancel.is_set():
            raise LeaseLost("the block was abandoned while it was being scored")
        if not np.isfinite(values).all():
            raise BadInput(
                f"model {self._source}: gives a text the value {values[~np.isfinite(values)][0]}; use another"
            )
        return [
            (part,) for part in np.split(values, np.cumsum([len(task[REWARD_MODEL.needs[1]]) for task in tasks])[:-1])
        ]

    def _stopping(self, cancel: threading.Event) -> Callable[[], None]:
        """Return what the model calls after each micro-batch. It raises LeaseLost once `cancel` is set."""

        def on_part() -> None:
            self._count()
            if self._alone and cancel.is_set():  # if there are other ranks, no rank may leave a collective
                raise LeaseLost("the block was abandoned between two micro-batches")

        return on_part
