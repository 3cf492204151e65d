"""Completions: decides which results are accepted or refused, and what happens to their tasks. Pure.

A request is checked as a whole before anything changes.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from proto.messages import (
    Complete,
    DropReason,
    ErrorCode,
    Outcome,
    Refusal,
    TaskResult,
)
from proto.tensors import Array
from services.scheduler import scalars
from services.scheduler.evaluations import Evaluation
from services.scheduler.events import Tell
from services.scheduler.freshness import Freshness
from services.scheduler.leases import Lease
from services.scheduler.ledger import DEATH, FAILURE
from services.scheduler.losses import drop_reason
from services.scheduler.plan import stage_index
from services.scheduler.slot_index import NO_SLOT
from services.scheduler.tasks import EVALUATION, TaskState
from shared.rpc.errors import RpcError

MOST_LAYOUTS = 1 << 16
"""Maximum number of distinct sets of scalars in a run. A task refers to its set by a number of 16 bits."""


class Accepting(Freshness):
    """The verb `complete`."""

    def complete(self, request: Complete) -> list[Refusal]:
        """Accept results and return the refused ones."""
        lease = self.leases.get(request.lease_id)
        if lease is not None and lease.incarnation != request.incarnation:
            lease = None
        stage = stage_index(self.plan, request.stage)
        self._check_scalars(request, stage)
        layout = self._layout(request.scalars)
        filters = stage == 0 and self._filters(request)
        refused: list[Refusal] = []
        first = 0
        for result in request.results:
            slot = self.tasks.find(result.task_id)
            problem = self._problem(slot, stage, lease, result)
            if problem is None and stage > 0 and request.scalars and result.samples != self.tasks.samples[slot]:
                samples = self.tasks.samples[slot]
                problem = ErrorCode.CONFLICT, f"{result.task_id}: scalars of {result.samples} samples, not {samples}"
            if problem is not None:
                refused.append(Refusal(result.task_id, result.fence, *problem))
            elif lease is not None and not self.tasks.done[slot] >> stage & 1:
                lease.open -= 1
                if result.outcome == Outcome.DONE and result.store in self.gone:
                    self._retry(slot, DEATH, f"{result.store} is gone")
                elif result.outcome == Outcome.DONE:
                    packed = scalars.pack(request.scalars, first, result.samples)
                    self._accept(slot, stage, result, layout, packed, filters=filters)
                elif result.outcome == Outcome.RETRY:
                    self._retry(slot, FAILURE, result.reason)
                elif result.samples_failed and self.tasks.admission[slot] == EVALUATION:
                    self._score_failed(slot, result)
                else:
                    self._count_lost(slot, result)
                    self._drop(slot, drop_reason(result.why), result.reason)
            first += result.samples if result.outcome == Outcome.DONE else 0
        if lease is not None:
            if request.final and lease.open:
                self._give_up(lease, 0 if request.untouched else DEATH)
            elif not lease.open:
                self.leases.remove(lease)
            self._free_versions()
        return refused

    def _check_scalars(self, request: Complete, stage: int) -> None:
        if stage < 0:
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: not in this run's graph")
        strange = sorted(request.scalars.keys() - self.plan.stages[stage].scalars) if stage > 0 else []
        if strange:
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage}: scalar {strange[0]!r} is not its to bring")
        for each in request.results:
            numbers = (
                (each.samples, 16),
                (each.samples_failed, 16),
                (each.tokens, 32),
                (each.nbytes, 48),
                (each.content_hash, 64),
                *((count, 16) for count in each.lost.values()),
            )
            if any(not 0 <= number < 1 << bits for number, bits in numbers):
                raise RpcError(ErrorCode.BAD_REQUEST, f"{each.task_id}: a number in its result is out of range")
        layout = scalars.layout_of(request.scalars)
        if len(self.layouts) >= MOST_LAYOUTS and layout not in self.layouts:
            text = f"scalars {', '.join(request.scalars)[:200]}: {MOST_LAYOUTS} different sets are the limit of a run"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        samples = sum(result.samples for result in request.results if result.outcome == Outcome.DONE)
        for name, values in request.scalars.items():
            if values.shape != (samples,):
                raise RpcError(
                    ErrorCode.BAD_REQUEST,
                    f"scalar {name!r} of shape {list(values.shape)}: the results have {samples} samples in all",
                )

    def _layout(self, columns: dict[str, Array]) -> int:
        layout = scalars.layout_of(columns)
        if layout not in self.layouts:
            self.layouts.append(layout)
        return self.layouts.index(layout)

    def _problem(self, slot: int, stage: int, lease: Lease | None, result: TaskResult) -> tuple[str, str] | None:
        """Return `(code, message)` if the result is refused, else None."""
        if slot == NO_SLOT:
            return ErrorCode.COLLECTED, f"{result.task_id}: collected, or never admitted"
        fence = self.tasks.fence[slot]
        if result.fence < fence:
            return ErrorCode.COLLECTED, f"{result.task_id}: fence {result.fence} is over, it is now {fence}"
        if result.fence > fence:
            return ErrorCode.CONFLICT, f"{result.task_id}: fence {result.fence} was never given, it is now {fence}"
        if self.tasks.done[slot] >> stage & 1:
            if result.outcome == Outcome.DONE and self.tasks.hash[stage][slot] == result.content_hash:
                return None
            return ErrorCode.CONFLICT, f"{result.task_id}: fence {fence} was accepted with other content"
        if self.tasks.state[slot] == TaskState.DROPPED:
            return ErrorCode.COLLECTED, f"{result.task_id}: dropped"
        if lease is None or self.tasks.lease[slot] != lease.lease_id or lease.stage != stage:
            return ErrorCode.LOST, f"{result.task_id}: the lease is no longer held"
        return None

    def _accept(self, slot: int, stage: int, result: TaskResult, layout: int, packed: bytes, *, filters: bool) -> None:
        table = self.tasks
        table.lease[slot] = 0
        table.done[slot] |= 1 << stage
        table.store[stage][slot] = self._store_index(result.store)
        table.hash[stage][slot] = result.content_hash
        table.part_bytes[stage][slot] = result.nbytes
        table.nbytes[slot] += result.nbytes
        if stage == 0:
            table.samples[slot] = result.samples
            table.failed[slot] = result.samples_failed
            table.tokens[slot] = result.tokens
            self._count_lost(slot, result)
            table.scalars[slot] = layout.to_bytes(2, "little") + packed
        elif self.layouts[layout]:
            self._add_scalars(slot, self.layouts[layout], packed)
        if table.admission[slot] == EVALUATION:
            self._score(slot)
            return
        if stage == 0 and result.samples < min(2, self.plan.group_size):
            text = f"{result.samples} of {self.plan.group_size} samples are left"
            self._drop(slot, DropReason.REWARD_FAILED, text)
            return
        self.dropped_in_a_row = 0
        if filters and self._filter(slot):
            return
        table.move(slot, TaskState.ROLLED_OUT)
        if table.done[slot] == (1 << len(self.plan.stages)) - 1:
            if self.drop_if_stale(slot):
                return
            table.move(slot, TaskState.READY)
            self.window.mark_ready(table.admission[slot])
            return
        for later in range(1, len(self.plan.stages)):
            needed = self._needed[later]
            if needed >> stage & 1 and table.done[slot] & needed == needed:
                self.ready[later].push(table.admission[slot])

    def _count_lost(self, slot: int, result: TaskResult) -> None:
        """Count the lost samples of a training task. Evaluations count their failed samples themselves."""
        if self.tasks.admission[slot] != EVALUATION:
            self.losses.lose(self.tasks.admission[slot], result)

    def _add_scalars(self, slot: int, layout: scalars.Layout, packed: bytes) -> None:
        """Add the per-sample values of a later stage to those of the rollout."""
        samples = self.tasks.samples[slot]
        data = self.tasks.scalars[slot] or b"\0\0"
        before = self.layouts[int.from_bytes(data[:2], "little")]
        columns = {name: scalars.column(before, name, samples, data[2:]) for name, _ in before}
        columns |= {name: scalars.column(layout, name, samples, packed) for name, _ in layout}
        joined = {name: values for name, values in columns.items() if values is not None}
        self.tasks.scalars[slot] = self._layout(joined).to_bytes(2, "little") + scalars.pack(joined, 0, samples)

    def _filters(self, request: Complete) -> bool:
        """Return whether the filter of this step has room for all tasks of the request whose rewards are equal.

        The filter drops all of them or none: they share a file, which a store frees with its last task, so bytes of
        dropped tasks that remain in it would not be counted.
        """
        rewards = request.scalars.get("reward")
        if rewards is None or self.filtered >= self.plan.filter_limit:
            return False
        samples = [result.samples for result in request.results if result.outcome == Outcome.DONE and result.samples]
        groups = np.split(rewards, np.cumsum(samples))[: len(samples)]
        return self.filtered + sum(bool((group == group[0]).all()) for group in groups) <= self.plan.filter_limit

    def _filter(self, slot: int) -> bool:
        """Drop a task whose rewards are all equal, from which no group estimator learns. Admission replaces it.

        At most `filter_limit` tasks are dropped per step, so a run whose tasks are all solved goes on. Source: dynamic
        sampling of DAPO (arXiv 2503.14476), section 3.2. Return whether the task was dropped.
        """
        data = self.tasks.scalars[slot] or b"\0\0"
        layout = self.layouts[int.from_bytes(data[:2], "little")]
        rewards = scalars.column(layout, "reward", self.tasks.samples[slot], data[2:])
        if rewards is None or (rewards != rewards[0]).any():
            return False
        self.filtered += 1
        self.filtered_samples += len(rewards)
        self.filtered_reward += float(np.sum(rewards, dtype=np.float64))
        self._drop(slot, DropReason.FILTERED, f"all {len(rewards)} rewards are {float(rewards[0])}")
        return True

    def _score(self, slot: int) -> None:
        one = self._evaluation_of(slot)
        packed = self.tasks.scalars[slot] or b"\0\0"
        layout = self.layouts[int.from_bytes(packed[:2], "little")]
        rewards = scalars.column(layout, "reward", self.tasks.samples[slot], packed[2:])
        if rewards is None or not len(rewards):
            self._drop(slot, DropReason.OTHER, "no sample was scored")
            return
        self._end_scored(slot, one, rewards, self.tasks.failed[slot])

    def _score_failed(self, slot: int, result: TaskResult) -> None:
        """Score an evaluation task whose samples all failed although the policy was asked."""
        self.out.append(Tell("scheduler/dropped", {"task": result.task_id, "reason": result.reason[:200]}))
        self._end_scored(slot, self._evaluation_of(slot), np.zeros(0, np.float32), result.samples_failed)

    def _end_scored(self, slot: int, one: Evaluation, rewards: Array, failed: int) -> None:
        rows = next(each.rows for each in self.plan.evals if each.name == one.name)
        one.score(bisect_left(rows, self.tasks.index[slot]), rewards, failed)
        self.tasks.move(slot, TaskState.SCORED)
        self._end_of_evaluation_task(one)
        self._collect(slot)
