"""Samples the tasks of leases whose samples are single answers, and resumes unfinished answers from notes.

Notes are not used if their tokens are too old for the lease, or if the lease needs one exact version (evaluations,
deterministic mode); no notes are written for such a lease.

Blocks never wait for a note; losing a note only costs tokens. Each task has one file in the run directory. The file is
replaced by a rename, so a kill leaves either the previous note or the new one. Engines on one host share the files.
Only a task's newest note waits to be written, so on a slow disk notes are written less often instead of piling up. A
note that was written only after its task was completed (because its engine hung and then continued) is removed once it
is STALE_S older than the newest note.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from proto.messages import ErrorCode
from proto.tensors import Array
from services.rollout.engine import (
    Engine,
    FinishReason,
    Generation,
    GenerationCancelled,
    GenerationWatch,
    Prompt,
    SamplingParams,
)
from services.rollout.rewards.score import Score
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import (
    BlockVersions,
    Completion,
    Made,
    SequenceTokens,
    answers_of,
    at_end,
    single_turns,
)
from shared.data.source import content_text, is_conversation
from shared.lease import Lease, LeaseLost
from shared.rpc.errors import RpcError
from shared.sample import Sample

STALE_S = 3600.0
"""Maximum seconds by which a note may be older than the newest one. A task whose note is older than that was leased
again long ago or has ended. The age is not measured from the current time, so a run that is resumed after a week finds
its notes."""
CLOSE_S = 5.0
NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.UNFINISHED)


class AnswerSampler:
    """Samples the tasks of a lease, one answer per sample. It is used only on the service's loop."""

    def __init__(self, engine: Engine | None, journal: PartialJournal | None, *, ends: bool = False) -> None:
        """Without a `journal`, a sample that is cut off starts over. Without an `engine`, the rows have the answers.
        With `ends`, a value is learned at the end of each sample (`at_end`)."""
        self._engine = engine
        self._journal = journal
        self._ends = ends

    async def run(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Made]]:
        """Return every sample of the lease's tasks, in the shape [tasks][samples], without texts. For `versions`, see
        `EngineVersions.bring`.

        Raises LeaseLost.
        """
        groups = await self.sample(lease, tasks, versions)
        return [
            [
                Made(
                    [at_end(sequence) for sequence in sequences] if self._ends else sequences,
                    answer.finish_reason == FinishReason.LENGTH,
                    _sample(task, answer),
                    score=None if task.answers is None else Score(0.0),  # nothing learns from its reward
                )
                for sequences, answer in zip(_sequences(task, group), group, strict=True)
            ]
            for task, group in zip(tasks.ready, groups, strict=True)
        ]

    async def sample(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Completion]]:
        """Return the answers for each task, sampled as one block. Raises LeaseLost."""
        recited = dataset_answers(tasks.ready, versions.began)
        if recited is not None:
            return answers_of(recited, versions)
        if self._engine is None:
            raise RpcError(ErrorCode.INTERNAL, "a lease has tasks to sample, but this run has no engine")
        try:
            if self._journal is None or lease.grant.exact:
                prompts = [task.prompt() for task in tasks.ready]
                groups = await self._engine.generate(prompts, tasks.sampling, lease.cancel)
                return answers_of(groups, versions)
            return await self._noted(self._engine, self._journal, lease, tasks, versions)
        except GenerationCancelled as error:
            raise LeaseLost(str(error)) from None

    def forget(self, tasks: Sequence[ReadyTask]) -> None:
        """Delete the notes for `tasks`, whose lease has been completed."""
        if self._journal is not None:
            self._journal.forget([task.handle.task_id for task in tasks])

    async def _noted(
        self, engine: Engine, journal: PartialJournal, lease: Lease, tasks: PreparedTasks, versions: BlockVersions
    ) -> list[list[Completion]]:
        sampling = tasks.sampling
        wanted = ResumableNotes(
            samples=sampling.samples,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            lineage=versions.lineage,
            oldest=lease.grant.min_step,
            newest=versions.first,
        )
        ids = [task.handle.task_id for task in tasks.ready]
        notes = await asyncio.to_thread(lambda: [journal.read(task_id, wanted) for task_id in ids])
        answers = {task_id: noted for task_id, noted in zip(ids, notes, strict=True) if noted is not None}
        fresh = [task for task in tasks.ready if task.handle.task_id not in answers]
        for part in (_Fresh(fresh, sampling), _Resumed(tasks.ready, answers, sampling)):
            if part.prompts:

                def note(groups: list[list[Generation]], part: _Part = part) -> None:
                    journal.note(part.answers(groups, versions), versions.lineage, sampling.temperature)

                watch = GenerationWatch(journal.every_s, note)
                groups = await engine.generate(part.prompts, part.sampling, lease.cancel, watch)
                answers |= part.answers(groups, versions)
        return [answers[task_id] for task_id in ids]


def dataset_answers(tasks: Sequence[ReadyTask], swaps: int) -> list[list[Generation]] | None:
    """Return the data set's answers in place of sampled ones, or None if `tasks` must be sampled.

    This runs training on the rows' answers through the sampling path, without running a model. `swaps` is the engine's
    count of weight swaps. Log-probs are 0, as if the author of the data set had been certain. These log-probs suit only
    losses that do not use the sampler's log-probs (`Loss.from_rows`).
    """
    answers = [task.answers for task in tasks if task.answers is not None]
    if len(answers) < len(tasks) or not tasks:
        return None
    return [[_recited(np.asarray(one.token_ids, np.int32), swaps) for one in of_task] for of_task in answers]


def _recited(ids: Array, swaps: int) -> Generation:
    return Generation(ids, np.zeros(len(ids), np.float32), FinishReason.STOP, np.full(len(ids), swaps, np.int32))


def _sequences(task: ReadyTask, group: Sequence[Completion]) -> list[list[SequenceTokens]]:
    trained = None if task.answers is None else [np.asarray(answer.trained) for answer in task.answers]
    return single_turns(task.prompt_ids, group, trained)


def _sample(task: ReadyTask, answer: Completion) -> Sample:
    """Return the sample of a task without its text. One whose answers are from a conversation has its messages."""
    learned = task.row["messages"] if task.answers is not None and is_conversation(task.row) else []
    messages = [message | {"content": content_text(message)} for message in learned]
    return Sample(
        task.handle.task_id,
        task.row,
        messages,
        "",
        answer.token_ids.tolist(),
        answer.finish_reason,
        turns=sum(message["role"] == "assistant" for message in messages) or 1,
        source=task.source,
    )


class _Fresh:
    """Tasks without notes: one prompt per task."""

    def __init__(self, tasks: Sequence[ReadyTask], sampling: SamplingParams) -> None:
        self.prompts = [task.prompt() for task in tasks]
        self.sampling = sampling

    def answers(self, groups: list[list[Generation]], versions: BlockVersions) -> dict[str, list[Completion]]:
        """Return the answers by task id."""
        made = answers_of(groups, versions)
        return {prompt.name: group for prompt, group in zip(self.prompts, made, strict=True)}


class _Resumed:
    """Tasks with notes: one prompt per sample to resume, with random numbers that have not been used before."""

    def __init__(
        self, tasks: Sequence[ReadyTask], noted: dict[str, list[Completion]], sampling: SamplingParams
    ) -> None:
        self._noted = dict(noted)
        self._places: list[tuple[str, int]] = []
        self.prompts: list[Prompt] = []
        self.sampling = replace(sampling, samples=1, block_rows=0)
        for task in tasks:
            for index, answer in enumerate(noted.get(task.handle.task_id, ())):
                if not answer.finish_reason:
                    self._places.append((task.handle.task_id, index))
                    name = f"{task.handle.task_id}/{index}+{len(answer.token_ids)}"
                    self.prompts.append(Prompt(name, task.prompt_ids, answer.token_ids.tolist()))

    def answers(self, groups: list[list[Generation]], versions: BlockVersions) -> dict[str, list[Completion]]:
        """Return the answers by task id. Samples that had already ended keep the answers in their notes."""
        answers: dict[str, list[Completion]] = {}
        for (task_id, index), (after,) in zip(self._places, answers_of(groups, versions), strict=True):
            before = self._noted[task_id][index]
            answers.setdefault(task_id, list(self._noted[task_id]))[index] = _joined(before, after)
        return answers


_Part = _Fresh | _Resumed


def _joined(before: Completion, after: Completion) -> Completion:
    return Completion(
        np.concatenate([before.token_ids, after.token_ids]),
        np.concatenate([before.logprobs, after.logprobs]),
        np.concatenate([before.versions, after.versions]),
        after.finish_reason,
    )


@dataclass(frozen=True, slots=True)
class ResumableNotes:
    """The notes that a lease can resume: `samples` answers of at most `max_new_tokens` tokens, sampled at `temperature`
    by the versions `oldest` to `newest` of `lineage`."""

    samples: int
    max_new_tokens: int
    temperature: float
    lineage: int
    oldest: int
    newest: int


class _Note(msgspec.Struct, array_like=True):
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: FinishReason


class _TaskNotes(msgspec.Struct):
    task_id: str
    lineage: int
    temperature: float
    samples: list[_Note]


class PartialJournal:
    """The notes in one folder. `note` may be called from any thread and returns at once."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """`every_s` is the number of seconds between two notes for a block."""
        self.every_s = every_s
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="partial")
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[int, float, Sequence[Completion]]] = {}
        """Lineage, temperature and answers of the notes to write, by task id."""
        self._writer.submit(self._sweep)

    def note(self, answers: Mapping[str, Sequence[Completion]], lineage: int, temperature: float) -> None:
        """Write `answers` (by task id, one per sample) in place of the previous notes of these tasks."""
        with self._lock:
            is_scheduled = bool(self._waiting)
            for task_id, samples in answers.items():
                self._waiting[task_id] = (lineage, temperature, samples)
        if not is_scheduled:
            with contextlib.suppress(RuntimeError):  # the writer might have been closed in the meantime
                self._writer.submit(self._write)

    def forget(self, task_ids: Sequence[str]) -> None:
        """Remove the notes of completed tasks."""
        with self._lock:
            for task_id in task_ids:
                self._waiting.pop(task_id, None)

        def remove() -> None:
            for task_id in task_ids:
                self._file(task_id).unlink(missing_ok=True)
            self._sweep()

        with contextlib.suppress(RuntimeError):
            self._writer.submit(remove)

    def read(self, task_id: str, wanted: ResumableNotes) -> list[Completion] | None:
        """Return the answers to resume, one per sample, or None if there is nothing to resume.

        The answers for samples that must start over are empty. This method blocks, so do not call it on the loop's
        thread.
        """
        try:
            record = msgspec.msgpack.decode(self._file(task_id).read_bytes(), type=_TaskNotes)
            answers = [_answer(note) for note in record.samples]
        except (OSError, ValueError):
            return None
        of = (record.task_id, record.lineage, record.temperature, len(answers))
        if of != (task_id, wanted.lineage, wanted.temperature, wanted.samples):
            return None
        kept = [answer if _fits(answer, wanted) else NOTHING for answer in answers]
        return kept if any(len(answer.token_ids) for answer in kept) else None

    def close(self) -> None:
        """Write the pending notes and stop. If the directory does not respond, wait at most CLOSE_S."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._writer.submit(lambda: None).result(CLOSE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _sweep(self) -> None:
        """Remove stale notes."""
        written: dict[Path, float] = {}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another engine might have removed it
                written[path] = path.stat().st_mtime
        oldest = max(written.values(), default=0.0) - STALE_S
        for path, at in written.items():
            if at < oldest:
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        with contextlib.suppress(OSError):  # the disk may be full
            for task_id, (lineage, temperature, answers) in waiting.items():
                target = self._file(task_id)
                written = target.with_suffix(f".{os.getpid()}")
                notes = _TaskNotes(task_id, lineage, temperature, [_note(answer) for answer in answers])
                written.write_bytes(msgspec.msgpack.encode(notes))
                written.rename(target)

    def _file(self, task_id: str) -> Path:
        return self._folder / f"{task_id.replace('/', '-')}.msgpack"


def _note(answer: Completion) -> _Note:
    return _Note(
        token_ids=answer.token_ids.tobytes(),
        logprobs=answer.logprobs.tobytes(),
        versions=answer.versions.tobytes(),
        finish_reason=answer.finish_reason,
    )


def _answer(note: _Note) -> Completion:
    """Decode a note. Raises ValueError if its parts differ in length."""
    answer = Completion(
        np.frombuffer(note.token_ids, np.int32),
        np.frombuffer(note.logprobs, np.float32),
        np.frombuffer(note.versions, np.int32),
        note.finish_reason,
    )
    if not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions):
        raise ValueError("a note's numbers of tokens, log-probs and versions differ")
    return answer


def _fits(answer: Completion, wanted: ResumableNotes) -> bool:
    if not len(answer.token_ids):
        return True
    longest = wanted.max_new_tokens if answer.finish_reason else wanted.max_new_tokens - 1
    return (
        len(answer.token_ids) <= longest
        and int(answer.versions.min()) >= wanted.oldest
        and int(answer.versions.max()) <= wanted.newest
    )
