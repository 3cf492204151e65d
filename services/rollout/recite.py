"""Supervised fine-tuning on the same path: the answers of the data set in the place of sampled ones. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.rollout.engine import Generation
from services.rollout.tasks import ReadyTask


def recited(tasks: Sequence[ReadyTask], samples: int, swaps: int) -> list[list[Generation]] | None:
    """The answers of `tasks` as generations, `samples` alike for each, as of weights that were replaced `swaps` times;
    None when these tasks are to be sampled.

    Their log-probs are 0: whoever wrote the data set was sure of them. No loss that looks at log-probs of who sampled
    goes with this (`algorithm.loss.name: cross_entropy` does not).
    """
    answers = [task.answer_ids for task in tasks if task.answer_ids is not None]
    if len(answers) < len(tasks) or not tasks:
        return None
    made = [np.asarray(answer, np.int32) for answer in answers]
    return [
        [Generation(ids, np.zeros(len(ids), np.float32), "stop", np.full(len(ids), swaps, np.int32))] * samples
        for ids in made
    ]
