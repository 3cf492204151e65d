"""Samples the tasks of leases whose samples are single answers, and resumes unfinished answers from notes.

Notes are not used if their tokens are too old for the lease, or if the lease needs one exact version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.rollout.engine import (
    Engine,
    FinishReason,
    Generation,
    GenerationCancelled,
    GenerationWatch,
    Prompt,
    SamplingParams,
)
from services.rollout.sampling.partial import PartialJournal, ResumableNotes
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Completion, Made, answers_of, single_turns
from shared.lease import Lease, LeaseLost
from shared.sample import Sample


class AnswerSampler:
    """Samples the tasks of a lease, one answer per sample. It is used only on the service's loop."""

    def __init__(self, engine: Engine, journal: PartialJournal | None) -> None:
        """Without a `journal`, a sample that is cut off starts over."""
        self._engine = engine
        self._journal = journal

    async def run(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Made]]:
        """Return every sample of the lease's tasks, in the shape [tasks][samples], without texts. For `versions`, see
        `EngineVersions.bring`.

        Raises LeaseLost.
        """
        groups = await self.sample(lease, tasks, versions)
        return [
            [
                Made(
                    rolled,
                    Sample(task.handle.task_id, task.row, [], "", answer.token_ids.tolist(), answer.finish_reason),
                    score=None,
                )
                for rolled, answer in zip(single_turns(task.prompt_ids, group), group, strict=True)
            ]
            for task, group in zip(tasks.ready, groups, strict=True)
        ]

    async def sample(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Completion]]:
        """Return the answers for each task, sampled as one block. Raises LeaseLost."""
        recited = dataset_answers(tasks.ready, tasks.sampling.samples, versions.began)
        if recited is not None:
            return answers_of(recited, versions)
        try:
            if self._journal is None or lease.grant.exact:
                prompts = [task.prompt() for task in tasks.ready]
                groups = await self._engine.generate(prompts, tasks.sampling, lease.cancel)
                return answers_of(groups, versions)
            return await self._noted(self._journal, lease, tasks, versions)
        except GenerationCancelled as error:
            raise LeaseLost(str(error)) from None

    def forget(self, tasks: Sequence[ReadyTask]) -> None:
        """Delete the notes for `tasks`, whose lease has been completed."""
        if self._journal is not None:
            self._journal.forget([task.handle.task_id for task in tasks])

    async def _noted(
        self, journal: PartialJournal, lease: Lease, tasks: PreparedTasks, versions: BlockVersions
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
                groups = await self._engine.generate(part.prompts, part.sampling, lease.cancel, watch)
                answers |= part.answers(groups, versions)
        return [answers[task_id] for task_id in ids]


def dataset_answers(tasks: Sequence[ReadyTask], samples: int, swaps: int) -> list[list[Generation]] | None:
    """Return the data set's answers in place of sampled ones, or None if `tasks` must be sampled.

    This runs supervised fine-tuning through the sampling path, without running a model. Each task gets `samples`
    identical answers, and `swaps` is the engine's count of weight swaps. Log-probs are 0, as if the author of the data
    set had been certain. These log-probs suit only losses that do not use the sampler's log-probs, such as
    `algorithm.loss.name: cross_entropy`.
    """
    answers = [np.asarray(task.answer_ids, np.int32) for task in tasks if task.answer_ids is not None]
    if len(answers) < len(tasks) or not tasks:
        return None
    stop = FinishReason.STOP
    return [
        [Generation(ids, np.zeros(len(ids), np.float32), stop, np.full(len(ids), swaps, np.int32))] * samples
        for ids in answers
    ]


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
