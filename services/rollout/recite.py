"""Supervised fine-tuning on the same path: answers of the data set replace sampled ones. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.rollout.engine import Generation
from services.rollout.tasks import ReadyTask


def recited(tasks: Sequence[ReadyTask], samples: int, swaps: int) -> list[list[Generation]] | None:
    """Return the answers of `tasks` as generations, `samples` equal ones each, or None if the tasks are to be sampled.

    `swaps` is the engine's count of weight swaps. Log-probs are 0, as if the author of the data set had been certain.
    They suit only losses that do not use the sampler's log-probs, such as `algorithm.loss.name: cross_entropy`.
    """
    answers = [task.answer_ids for task in tasks if task.answer_ids is not None]
    if len(answers) < len(tasks) or not tasks:
        return None
    made = [np.asarray(answer, np.int32) for answer in answers]
    return [
        [Generation(ids, np.zeros(len(ids), np.float32), "stop", np.full(len(ids), swaps, np.int32))] * samples
        for ids in made
    ]
