"""Builds the shards that contain the texts of samples, for tasks whose samples are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proto.tensors import Array
from services.rollout.results.trajectory import Rolled
from services.rollout.rewards.score import Score, names_of
from services.rollout.sampling.prompts import PromptBuilder, tool_calls
from services.rollout.sampling.tasks import ReadyTask
from services.rollout.workflows.runner import Made
from shared.data import Row
from shared.samples.choice import Choice
from shared.samples.text import SampleText, TaskText, pack


class SampleTexts:
    """Builds the shards for chosen tasks. It is used only on the tokenizer's thread."""

    def __init__(self, choice: Choice, prompts: PromptBuilder, functions: Sequence[str]) -> None:
        """`functions` are the import paths of the reward functions."""
        self.choice = choice
        self._prompts = prompts
        self._first = names_of(functions)[0]

    def shards(
        self,
        tasks: Sequence[ReadyTask],
        made: Sequence[Sequence[Made]],
        scores: Sequence[Sequence[Score]],
        not_sampled: Mapping[str, Row],
    ) -> dict[str, Array]:
        """Return the shards of the chosen tasks, by task id. Those of tasks that were `not_sampled` have only the
        prompt and the answer of the row."""
        sampled = {
            task.handle.task_id: self._shard(task, group, group_scores)
            for task, group, group_scores in zip(tasks, made, scores, strict=True)
            if self.choice.takes(task.handle.task_id)
        }
        return sampled | {
            task_id: pack(TaskText(_prompt(row), [], row.get("answer")), 0)
            for task_id, row in not_sampled.items()
            if self.choice.takes(task_id)
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
        return SampleText(
            completion=sample.completion,
            finish_reason=str(sample.finish_reason),
            reward=score.value,
            rewards=score.parts or self._named(made, score),
            info=score.info,
            failure=score.failure,
            length=len(sample.token_ids) if score.value is None else 0,
            metrics=made.metrics,
            turns=sample.turns,
            tool_calls=sum(len(tool_calls(text)) for text in (said or [sample.completion]) if "<tool_call>" in text),
            messages=[] if single else sample.messages,
            pieces=[] if score.value is None else self._prompts.pieces(answer_tokens(made.rolled)),
        )

    def _named(self, made: Made, score: Score) -> dict[str, float]:
        """Return the reward under the name of its function, unless the workflow gave it. The parts of a sum of several
        functions have the functions' names already."""
        return {self._first: score.value} if made.score is None and score.value is not None else {}


def _prompt(row: Row) -> str | list[dict[str, Any]]:
    """Return the row's prompt. A prompt that is neither text nor messages is one of the reasons to drop a row."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return prompt
    return prompt if isinstance(prompt, str) else repr(prompt)


def _tokens(made: Made) -> int:
    """Return the number of tokens of a sample. A workflow that failed has left no sequences."""
    return sum(len(sequence.token_ids) for sequence in made.rolled.sequences) or len(made.sample.token_ids)


def answer_tokens(rolled: Rolled) -> list[int]:
    """Return a sample's tokens, beginning in each sequence with the first sampled token."""
    tokens: list[int] = []
    for sequence in rolled.sequences:
        tokens += sequence.token_ids[int(np.argmax(sequence.loss_mask)) :].tolist()
    return tokens
