"""Builds the shards that contain the texts of samples, for tasks whose samples are recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proto.tensors import Array
from services.rollout.prompts import PromptBuilder, tool_calls
from services.rollout.rewards.score import Score
from services.rollout.tasks import ReadyTask
from services.rollout.trajectory import Rolled
from services.rollout.workflows.runner import Made
from shared.samples.choice import Choice
from shared.samples.text import SampleText, TaskText, pack


class SampleTexts:
    """Builds the shards for chosen tasks. It is used only on the tokenizer's thread."""

    def __init__(self, choice: Choice, prompts: PromptBuilder) -> None:
        self.choice = choice
        self._prompts = prompts

    def shards(
        self, tasks: Sequence[ReadyTask], made: Sequence[Sequence[Made]], scores: Sequence[Sequence[Score]]
    ) -> dict[str, Array]:
        """Return the shards of the chosen tasks, by task id. Samples without a score are left out."""
        return {
            task.handle.task_id: self._shard(task, group, group_scores)
            for task, group, group_scores in zip(tasks, made, scores, strict=True)
            if self.choice.takes(task.handle.task_id)
        }

    def _shard(self, task: ReadyTask, group: Sequence[Made], scores: Sequence[Score]) -> Array:
        alive = [(each, score) for each, score in zip(group, scores, strict=True) if score.value is not None]
        samples = [self._sample(each, score) for each, score in alive]
        tokens = sum(len(sequence.token_ids) for each, _ in alive for sequence in each.rolled.sequences)
        return pack(TaskText(task.row.get("prompt", ""), samples, task.row.get("answer")), tokens)

    def _sample(self, made: Made, score: Score) -> SampleText:
        sample = made.sample
        said = [str(each.get("content", "")) for each in sample.messages if each.get("role") == "assistant"]
        single = sample.turns == 1 and len(sample.messages) <= 2
        return SampleText(
            completion=sample.completion,
            finish_reason=str(sample.finish_reason),
            reward=score.value or 0.0,
            rewards=score.parts,
            metrics=made.metrics,
            turns=sample.turns,
            tool_calls=sum(len(tool_calls(text)) for text in (said or [sample.completion]) if "<tool_call>" in text),
            messages=[] if single else sample.messages,
            pieces=self._prompts.pieces(answer_tokens(made.rolled)),
        )


def answer_tokens(rolled: Rolled) -> list[int]:
    """Return a sample's tokens, beginning in each sequence with the first sampled token."""
    found: list[int] = []
    for each in rolled.sequences:
        found += each.token_ids[int(np.argmax(each.loss_mask)) :].tolist()
    return found
