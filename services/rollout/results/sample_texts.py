"""Writes the texts of samples: for reward functions, as tokens for a reward model, and in shards for the tasks that are
recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from proto.messages import LossReason
from proto.tensors import Array
from services.rollout.engine import SamplingParams
from services.rollout.rewards.score import Score, failed, names_of
from services.rollout.sampling.prompts import PromptBuilder, PromptTooLong
from services.rollout.sampling.reader import TextReader
from services.rollout.sampling.tasks import TEXT_S, OnText, PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import Made, SequenceTokens
from shared.data import Row
from shared.lease import Lease
from shared.openai_api.tools import tool_calls
from shared.sample import messages_of
from shared.samples.text import Choice, SampleText, TaskText, pack
from shared.topology.reward import REWARD_MODEL_FUNCTION


class SampleTexts:
    """The texts of samples: for the reward functions, and in shards for the tasks that are recorded."""

    def __init__(
        self,
        choice: Choice | None,
        prompts: PromptBuilder,
        functions: Sequence[str],
        on_text: OnText,
        reader: TextReader | None = None,
        *,
        most_read: int = 0,
        single: bool = True,
    ) -> None:
        """`choice` selects the recorded tasks; None: none is recorded. `functions` are the import paths of the reward
        functions. `on_text` runs work on the tokenizer's thread. `reader` makes the tokens for the reward model, at
        most `most_read` of them for a sample; it is None in a run without a reward model. `single` says whether a
        sample is one answer to its prompt, not a workflow's."""
        self._choice = choice
        self._prompts = prompts
        self._first = names_of(functions)[0]
        self._on_text = on_text
        self._reader = reader
        self._most_read = most_read
        self._single = single

    async def write(self, lease: Lease, sampling: SamplingParams, made: Sequence[Sequence[Made]]) -> None:
        """Decode the texts of single answers for the reward functions, while the next lease is being sampled."""
        flat = [answer.sample for group in made for answer in group]

        def decode() -> list[str]:
            return [self._prompts.completion(sample.token_ids, sampling.stop) for sample in flat]

        for sample, text in zip(flat, await lease.within(TEXT_S, self._on_text(decode)), strict=True):
            sample.completion = text
            sample.messages = sample.messages or messages_of(sample.row, text)

    async def read(
        self, lease: Lease, made: list[list[Made]], scores: list[list[Score]]
    ) -> tuple[list[list[Made]], list[list[Score]]]:
        """Return the samples with the tokens for the reward model, if there is one, and their scores. A sample that it
        cannot read has failed."""
        reader = self._reader
        if reader is None:
            return made, scores

        def work() -> list[list[tuple[Made, Score]]]:
            return [
                [self._read(reader, *pair) for pair in zip(group, of_group, strict=True)]
                for group, of_group in zip(made, scores, strict=True)
            ]

        pairs = await lease.within(TEXT_S, self._on_text(work))
        return [[one for one, _ in group] for group in pairs], [[score for _, score in group] for group in pairs]

    def _read(self, reader: TextReader, made: Made, score: Score) -> tuple[Made, Score]:
        if score.value is None:
            return made, score
        sample, prompt = made.sample, made.sample.row.get("prompt")
        raw = isinstance(prompt, str) and self._single
        text = f"{prompt}{sample.completion}" if raw else sample.messages
        try:
            if not text:
                raise ValueError("the workflow has asked the policy for no chat")
            ids = reader.token_ids(text, sample.row.get("tools"), at_most=self._most_read)
        except ValueError as error:
            limit = " (reward_model.max_tokens)" if isinstance(error, PromptTooLong) else ""
            why = f"cannot read a sample of {sample.task_id}: {error}{limit}"
            return made, failed(REWARD_MODEL_FUNCTION, LossReason.UNREADABLE, why)
        return replace(made, read=np.array(ids, np.int32)), score

    async def recorded(
        self,
        lease: Lease,
        tasks: PreparedTasks,
        made: Sequence[Sequence[Made]],
        scores: Sequence[Sequence[Score]],
        task_ids: Sequence[str],
    ) -> dict[str, Array]:
        """Return the shards with the texts of those of `task_ids` that are recorded, by task id."""
        choice = self._choice
        if choice is None or not any(choice.takes(task_id) for task_id in task_ids):
            return {}
        work = partial(self._shards, choice, tasks, made, scores)
        return await lease.within(TEXT_S, self._on_text(work))

    def _shards(
        self,
        choice: Choice,
        tasks: PreparedTasks,
        made: Sequence[Sequence[Made]],
        scores: Sequence[Sequence[Score]],
    ) -> dict[str, Array]:
        """Return the shards of the chosen tasks, by task id. Those of tasks that were not sampled have only the prompt
        and the answer of the row."""
        sampled = {
            task.handle.task_id: self._shard(task, group, group_scores)
            for task, group, group_scores in zip(tasks.ready, made, scores, strict=True)
            if choice.takes(task.handle.task_id)
        }
        return sampled | {
            task_id: pack(TaskText(_prompt(row), [], row.get("answer")), 0)
            for task_id, row in tasks.not_sampled.items()
            if choice.takes(task_id)
        }

    def _shard(self, task: ReadyTask, group: Sequence[Made], scores: Sequence[Score]) -> Array:
        samples = [self._sample(sample, score) for sample, score in zip(group, scores, strict=True)]
        text = TaskText(
            _prompt(task.row),
            [sample for sample in samples if sample.reward is not None],
            task.row.get("answer"),
            failed=[sample for sample in samples if sample.reward is None],
        )
        return pack(text, sum(_tokens(sample) for sample in group))

    def _sample(self, made: Made, score: Score) -> SampleText:
        """Return the text of a sample. The tokens of a failed sample are not in the store, so they have no text."""
        sample = made.sample
        said = [str(message.get("content", "")) for message in sample.messages if message.get("role") == "assistant"]
        single = sample.turns == 1 and len(sample.messages) <= 2
        rewards = score.parts  # those of a sum of several functions have the functions' names already
        if not rewards and made.score is None and score.value is not None:
            rewards = {self._first: score.value}
        return SampleText(
            completion=sample.completion,
            finish_reason=str(sample.finish_reason),
            reward=score.value,
            rewards=rewards,
            info=score.info,
            failure=score.failure,
            length=len(sample.token_ids) if score.value is None else 0,
            metrics=made.metrics,
            turns=sample.turns,
            tool_calls=sum(len(tool_calls(text)) for text in (said or [sample.completion]) if "<tool_call>" in text),
            messages=[] if single else sample.messages,
            pieces=[] if score.value is None else self._prompts.pieces(answer_tokens(made.sequences)),
        )


def _prompt(row: Row) -> str | list[dict[str, Any]]:
    """Return the row's prompt. A prompt that is neither text nor messages is one of the reasons to drop a row."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return prompt
    return prompt if isinstance(prompt, str) else repr(prompt)


def _tokens(made: Made) -> int:
    """Return the number of tokens of a sample. A workflow that failed has left no sequences."""
    return sum(len(sequence.token_ids) for sequence in made.sequences) or len(made.sample.token_ids)


def answer_tokens(sequences: Sequence[SequenceTokens]) -> list[int]:
    """Return a sample's tokens, beginning in each sequence with the first sampled token."""
    tokens: list[int] = []
    for sequence in sequences:
        tokens += sequence.token_ids[int(np.argmax(sequence.loss_mask)) :].tolist()
    return tokens
