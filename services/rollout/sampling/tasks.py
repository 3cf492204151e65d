"""Prepares leased tasks: their rows, prompts and sampling parameters. This module samples nothing itself."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from proto.ids import split_task_id
from proto.messages import DropReason, ErrorCode, LeaseGrant, Outcome, TaskHandle, TaskResult
from services.rollout.engine import Prompt, SamplingParams
from services.rollout.sampling.prompts import GivenAnswer, NoChatTemplate, PromptBuilder, PromptTooLong
from services.rollout.sampling.reader import TextReader
from shared.data import DataError, Row, Source, SourceChanged, SourceLost, open_source
from shared.data.source import ANSWER, RowCheck, RowDigests, answer_text, is_conversation
from shared.lease import Lease
from shared.rpc.errors import BadInput, RpcError
from shared.sample import messages_of
from shared.stages import TRAIN
from shared.topology.data import TrainSource

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
    answers: list[GivenAnswer] | None = None
    """The answer of each sample if the data set provides them, or None if the answers are sampled."""
    source: str = ""
    """The name of the row's source, if the training set has several."""

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


@dataclass(frozen=True)
class _Part:
    """A source of a data set. `first` is the number of its first row in the data set, and `rows` the number of its rows
    with which the run began."""

    source: Source
    chosen: TrainSource
    check: RowCheck | None
    rows: int
    name: str
    first: int

    @classmethod
    def opened(
        cls, key: str, chosen: TrainSource, begun: Mapping[str, RowDigests], *, name: str = "", first: int = 0
    ) -> _Part:
        """Open the source that the topology key `key` names. Raises BadInput for a source that cannot be read."""
        try:
            source = open_source(chosen.source, where=key)
        except DataError as error:
            raise BadInput(str(error)) from error
        check = RowCheck(source, begun[key]) if key in begun else None
        return cls(source, chosen, check, begun[key].rows if key in begun else len(source), name, first)

    def with_system(self, row: Row, index: int) -> Row:
        """Return the row with the source's system message, unless its prompt begins with another one. Raises ValueError
        if the prompt is text."""
        system, prompt = self.chosen.system, row["prompt"]
        if system is None:
            return row
        if isinstance(prompt, str):
            key = f"data.train.sources.{self.name}.system"
            raise ValueError(
                f"{self.source.place(index)}: the prompt is text, which {key} cannot precede; use messages"
            )
        if prompt[0].get("role") == "system":
            return row
        begun = {"role": "system", "content": system}
        lists = {"prompt": [begun, *prompt]}
        return row | lists | ({"messages": [begun, *row["messages"]]} if is_conversation(row) else {})


class TaskSets:
    """The run's data sets and their sampling parameters. Only one thread at a time may use the object; this is the
    tokenizer's thread."""

    def __init__(
        self,
        topology: Topology,
        prompts: PromptBuilder,
        context_tokens: int,
        begun: Mapping[str, RowDigests] = _NOT_RECORDED,
        reader: TextReader | None = None,
    ) -> None:
        """Open every source. `context_tokens` is the model's maximum sequence length. `begun` are the rows with which
        the run began, by the key of their source. With a `reader`, each answer is trained on as the end of a text that
        has one value.

        Raises BadInput for a source that cannot be read.
        """
        self._topology = topology
        self._prompts = prompts
        self._context_tokens = context_tokens
        self._fields = topology.algorithm.loss.answers
        self._reader = reader
        self._end_tokens = int(reader is not None)
        """Number of tokens that follow an answer (`at_end`)."""
        self._parts: dict[str, list[_Part]] = {TRAIN: [], **{name: [] for name in topology.data.eval}}
        first = 0
        for name, chosen in topology.data.train.named.items():
            part = _Part.opened(topology.data.train.key(name), chosen, begun, name=name, first=first)
            self._parts[TRAIN].append(part)
            first += part.rows
        for name, section in topology.data.eval.items():
            alone = TrainSource.model_construct(source=section.source)
            self._parts[name].append(_Part.opened(f"data.eval.{name}.source", alone, begun))

    def prepare(self, grant: LeaseGrant) -> PreparedTasks:
        """Return the rows and prompts of a lease. A bad row or a prompt that is too long becomes a DROP with a one-line
        reason.

        Raises RpcError(bad_request) if the topology has no such split, or the split's source is lost: BadInput if its
        file has changed.
        """
        sampling = self._sampling(grant)
        ready: list[ReadyTask] = []
        dropped: list[TaskResult] = []
        not_sampled: dict[str, Row] = {}
        for handle in grant.batch.tasks:
            row: Row | None = None
            try:
                part, index = self._part(grant.split, handle.task_id)
                if part.check is not None:
                    part.check.check(index)  # raises SourceChanged if it named another row
                row = part.source.row(index)
                row = part.with_system(row, index)
                ids, answers = self._tokens(grant, part, index, row, sampling.max_new_tokens)
            except SourceChanged as error:
                raise BadInput(str(error)) from error
            except SourceLost as error:
                raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None
            except (DataError, ValueError, IndexError) as error:
                dropped.append(drop(handle, _why(error), f"{handle.task_id}: {error}"))
                not_sampled |= {handle.task_id: row} if row is not None else {}
                continue
            ready.append(ReadyTask(handle, row, ids, answers, part.name))
        min_survivors = min(2, sampling.samples) if grant.split == TRAIN else 1
        return PreparedTasks(ready, dropped, sampling, min_survivors, not_sampled)

    def _part(self, split: str, task_id: str) -> tuple[_Part, int]:
        """Return the source of a task and the index of its row there."""
        number, parts = split_task_id(task_id)[2], self._parts[split]
        part = parts[bisect.bisect_right(parts, number, key=lambda part: part.first) - 1]
        return part, number - part.first

    def _limit(self, split: str, part: _Part, new_tokens: int) -> tuple[int, str]:
        """Return the maximum number of tokens in a prompt, and what sets it."""
        context = f"the model's context of {self._context_tokens} less {new_tokens} new tokens"
        limits = [(self._context_tokens - new_tokens, context)]
        if split == TRAIN:
            train, own = self._topology.data.train.max_prompt_tokens, part.chosen.max_prompt_tokens
            limits += [] if train is None else [(train, "data.train.max_prompt_tokens")]
            limits += [] if own is None else [(own, f"data.train.sources.{part.name}.max_prompt_tokens")]
        return min(limits, key=lambda limit: limit[0])

    def _tokens(
        self, grant: LeaseGrant, part: _Part, index: int, row: Row, new_tokens: int
    ) -> tuple[list[int], list[GivenAnswer] | None]:
        """Return the token ids of the row's prompt, and the answers of its samples if these are trained on."""
        longest, limit = self._limit(grant.split, part, new_tokens)
        cut = self._topology.data.train.truncate if grant.split == TRAIN else "drop"
        place, fields = part.source.place(index), self._fields if grant.split == TRAIN else ()
        answers: list[GivenAnswer] = []
        try:
            if ANSWER in fields and is_conversation(row):
                ids, answer = self._prompts.conversation(row, part.chosen.chat_template)
                answers = [answer]
            else:
                ids = self._prompts.token_ids(row, longest if cut == "drop" else None, part.chosen.chat_template)
                ids, answers = self._answers(row, ids, fields, part.chosen.chat_template)
        except PromptTooLong as error:
            raise _TooLong(f"{place}: {error} ({limit})") from None
        except NoChatTemplate as error:
            raise NoChatTemplate(f"{place}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        for name, answer in zip(fields, answers, strict=True):
            if (tokens := len(answer.token_ids) + self._end_tokens) > new_tokens:
                size = f"{place}: {name} of {tokens} tokens"
                raise _TooLong(f"{size}: the limit is {new_tokens} (sampling.max_new_tokens)")
        if len(ids) > longest:
            if cut == "drop" or longest < 1:
                raise _TooLong(f"{place}: prompt of {len(ids)} tokens: the limit is {longest} ({limit})")
            ids = ids[-longest:] if cut == "left" else ids[:longest]
        return ids, (answers * grant.group_size if len(answers) == 1 else answers or None)

    def _answers(
        self, row: Row, ids: list[int], fields: Sequence[str], template_args: Mapping[str, Any]
    ) -> tuple[list[int], list[GivenAnswer]]:
        """Return the tokens of the row's prompt and of its answers, given those of the prompt alone."""
        if self._reader is None or not fields:
            return ids, [self._prompts.answer(row, name) for name in fields]
        whole: list[list[int]] = []
        for name in fields:
            answer = answer_text(row, name)
            text = f"{row['prompt']}{answer}" if isinstance(row["prompt"], str) else messages_of(row, answer)
            whole.append(
                self._reader.token_ids(
                    text, row.get("tools"), at_most=self._context_tokens, template_args=template_args
                )
            )
        columns = zip(ids, *whole, strict=False)
        start = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        return ids[:start], [GivenAnswer(one[start:], [True] * (len(one) - start)) for one in whole]

    def _sampling(self, grant: LeaseGrant) -> SamplingParams:
        topology = self._topology
        temperature, new_tokens = topology.sampling.temperature, topology.sampling.max_new_tokens
        if grant.split != TRAIN:
            chosen = topology.data.eval.get(grant.split)
            if chosen is None:
                raise RpcError(ErrorCode.BAD_REQUEST, f"lease of {grant.split!r}: data.eval.{grant.split} is not set")
            temperature, new_tokens = chosen.temperature, chosen.max_new_tokens or new_tokens
        recites = grant.split == TRAIN and bool(self._fields)
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
