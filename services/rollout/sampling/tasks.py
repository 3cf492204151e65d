"""Prepares leased tasks: their rows, prompts and sampling parameters. This module samples nothing itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from proto.ids import split_task_id
from proto.messages import DropReason, ErrorCode, LeaseGrant, Outcome, TaskHandle, TaskResult
from services.rollout.engine import Prompt, SamplingParams
from services.rollout.sampling.prompts import NoChatTemplate, PromptBuilder, PromptTooLong
from shared.data import DataError, Row, Source, SourceChanged, SourceLost, open_source
from shared.data.source import RowCheck, RowDigests
from shared.lease import Lease
from shared.rpc.errors import BadInput, RpcError
from shared.stages import TRAIN

if TYPE_CHECKING:
    from shared.topology import Topology

_NOT_RECORDED: Mapping[str, RowDigests] = MappingProxyType({})
OnText = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Function that runs blocking work on the thread that handles the rows and the tokenizer."""
TASKS_A_TURN = 4
TEXT_S = 120.0
"""Maximum seconds that one turn on the text thread may take, including the wait for earlier turns of other leases and
for rows that hang."""


@dataclass(frozen=True)
class ReadyTask:
    """A task that can be sampled: its handle, row and prompt tokens."""

    handle: TaskHandle
    row: Row
    prompt_ids: list[int]
    answer_ids: list[int] | None = None
    """The answer's token ids if the data set provides it (supervised fine-tuning), or None if the answer is sampled."""

    def prompt(self) -> Prompt:
        return Prompt(self.handle.task_id, self.prompt_ids)


@dataclass(frozen=True)
class PreparedTasks:
    """The tasks of a lease: those to sample, and results for those that can never be sampled."""

    ready: list[ReadyTask]
    dropped: list[TaskResult]
    sampling: SamplingParams
    min_survivors: int
    not_sampled: dict[str, Row] = field(default_factory=dict)
    """The rows of the `dropped` tasks, by task id, as far as they could be read."""


async def prepare(sets: TaskSets, lease: Lease, on_text: OnText) -> PreparedTasks:
    """Prepare the tasks of a lease, a few at a time.

    In between, other leases can use the text thread. Slow rows do not cause the lease to be lost. Raises LeaseLost, and
    the same errors as `TaskSets.prepare`.
    """
    grant = lease.grant
    parts: list[PreparedTasks] = []
    for first in range(0, max(len(grant.batch.tasks), 1), TASKS_A_TURN):
        lease.check()
        batch = replace(grant.batch, tasks=grant.batch.tasks[first : first + TASKS_A_TURN])
        parts.append(await lease.within(TEXT_S, on_text(partial(sets.prepare, replace(grant, batch=batch)))))
    return PreparedTasks(
        [task for part in parts for task in part.ready],
        [result for part in parts for result in part.dropped],
        parts[0].sampling,
        parts[0].min_survivors,
        {task_id: row for part in parts for task_id, row in part.not_sampled.items()},
    )


class TaskSets:
    """The run's data sets and their sampling parameters. Only one thread at a time may use the object; this is the
    tokenizer's thread."""

    def __init__(
        self,
        topology: Topology,
        prompts: PromptBuilder,
        context_tokens: int,
        begun: Mapping[str, RowDigests] = _NOT_RECORDED,
    ) -> None:
        """Open every source. `context_tokens` is the model's maximum sequence length. `begun` are the rows with which
        the run began, by the key of their source.

        Raises BadInput for a source that cannot be read.
        """
        self._topology = topology
        self._prompts = prompts
        self._context_tokens = context_tokens
        self._recites = topology.algorithm.loss.name == "cross_entropy"
        self._sources: dict[str, Source] = {}
        self._checks: dict[str, RowCheck] = {}
        named = {TRAIN: topology.data.train.source} | {
            name: chosen.source for name, chosen in topology.data.eval.items()
        }
        for split, source in named.items():
            key = "data.train.source" if split == TRAIN else f"data.eval.{split}.source"
            try:
                self._sources[split] = open_source(source, where=key)
            except DataError as error:
                raise BadInput(str(error)) from error
            if key in begun:
                self._checks[split] = RowCheck(self._sources[split], begun[key])

    def prepare(self, grant: LeaseGrant) -> PreparedTasks:
        """Return the rows and prompts of a lease. A bad row or a prompt that is too long becomes a DROP with a one-line
        reason.

        Raises RpcError(bad_request) if the topology has no such split, or the split's source is lost: BadInput if its
        file has changed.
        """
        sampling = self._sampling(grant)
        longest = self._context_tokens - sampling.max_new_tokens
        limit = f"the model's context of {self._context_tokens} less {sampling.max_new_tokens} new tokens"
        configured = self._topology.data.train.max_prompt_tokens
        if grant.split == TRAIN and configured is not None and configured < longest:
            longest, limit = configured, "data.train.max_prompt_tokens"
        ready: list[ReadyTask] = []
        dropped: list[TaskResult] = []
        not_sampled: dict[str, Row] = {}
        for handle in grant.batch.tasks:
            row: Row | None = None
            try:
                index = split_task_id(handle.task_id)[2]
                if grant.split in self._checks:
                    self._checks[grant.split].check(index)  # raises SourceChanged if it named another row
                row = self._sources[grant.split].row(index)
                ids = self._token_ids(grant.split, handle.task_id, row, longest, limit)
                answer = self._answer(grant.split, handle.task_id, row, sampling.max_new_tokens)
            except SourceChanged as error:
                raise BadInput(str(error)) from error
            except SourceLost as error:
                raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None
            except (DataError, ValueError, IndexError) as error:
                dropped.append(drop(handle, _why(error), f"{handle.task_id}: {error}"))
                not_sampled |= {handle.task_id: row} if row is not None else {}
                continue
            ready.append(ReadyTask(handle, row, ids, answer))
        min_survivors = min(2, sampling.samples) if grant.split == TRAIN else 1
        return PreparedTasks(ready, dropped, sampling, min_survivors, not_sampled)

    def _token_ids(self, split: str, task_id: str, row: Row, longest: int, limit: str) -> list[int]:
        try:
            ids = self._prompts.token_ids(row, longest)
        except ValueError as error:
            place = self._place(split, task_id)
            match error:
                case PromptTooLong():
                    raise _TooLong(f"{place}: {error} ({limit})") from None
                case NoChatTemplate():
                    raise NoChatTemplate(f"{place}: {error}") from None
                case _:
                    raise ValueError(f"{place}: {error}") from None
        if len(ids) > longest:
            place = self._place(split, task_id)
            raise _TooLong(f"{place}: prompt of {len(ids)} tokens: the limit is {longest} ({limit})")
        return ids

    def _answer(self, split: str, task_id: str, row: Row, longest: int) -> list[int] | None:
        if split != TRAIN or not self._recites:
            return None
        try:
            ids = self._prompts.answer_ids(row)
        except ValueError as error:
            raise ValueError(f"{self._place(split, task_id)}: {error}") from None
        if len(ids) > longest:
            place = self._place(split, task_id)
            raise _TooLong(f"{place}: answer of {len(ids)} tokens: the limit is {longest} (sampling.max_new_tokens)")
        return ids

    def _place(self, split: str, task_id: str) -> str:
        return self._sources[split].place(split_task_id(task_id)[2])

    def _sampling(self, grant: LeaseGrant) -> SamplingParams:
        topology = self._topology
        temperature, new_tokens = topology.sampling.temperature, topology.sampling.max_new_tokens
        if grant.split != TRAIN:
            chosen = topology.data.eval.get(grant.split)
            if chosen is None:
                raise RpcError(ErrorCode.BAD_REQUEST, f"lease of {grant.split!r}: data.eval.{grant.split} is not set")
            temperature, new_tokens = chosen.temperature, chosen.max_new_tokens or new_tokens
        recites = grant.split == TRAIN and self._recites
        return SamplingParams(
            samples=grant.group_size,
            temperature=temperature,
            max_new_tokens=new_tokens,
            seed=topology.run.seed,
            stop=() if recites else tuple(topology.sampling.stop),  # rewards see the text that is trained on
            block_rows=grant.block_rows,
        )


class _TooLong(ValueError):
    """A prompt or answer has more tokens than its limit. The message is one line."""


def _why(error: Exception) -> DropReason:
    match error:
        case _TooLong():
            return DropReason.TOO_LONG
        case NoChatTemplate():
            return DropReason.NO_CHAT_TEMPLATE
        case _:
            return DropReason.BAD_ROW


def drop(
    handle: TaskHandle, why: DropReason, reason: str, samples_failed: int = 0, lost: dict[str, int] | None = None
) -> TaskResult:
    """Return the result of a task that can never succeed. `reason` explains `why`; for `lost`, see `TaskResult`."""
    return TaskResult(
        task_id=handle.task_id,
        fence=handle.fence,
        outcome=Outcome.DROP,
        reason=reason.replace("\n", " ")[:400],
        samples_failed=samples_failed,
        why=why,
        lost=lost or {},
    )
