"""Calls reward functions before a run starts, in a process like those in which the run calls them.

The process makes no network connection: a call that connects to a judge or to another server ends there, with the kind
JUDGE. What the functions print is dropped.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from services.rollout.rewards.judge import RewardCall
from services.rollout.rewards.score import Score
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.host import Broken, UserHost
from services.rollout.user_code.load import Wanted
from shared.sample import Sample


async def tried(
    functions: Sequence[Wanted],
    groups: Sequence[Sequence[Sample]],
    *,
    timeout_s: float,
    memory_bytes: int,
    environment: Mapping[str, str],
) -> list[list[Score]]:
    """Call each function once for each group, and return its scores in the order of the groups.

    A function of single samples is called with the first sample of a group. The score of a group is the first that
    failed, or else that of its first sample. A function that has failed is not called again, so it has fewer scores
    than there are groups. Raises a one-line RpcError if the functions cannot be loaded.
    """
    paths = [(wanted.path, wanted.params) for wanted in functions]
    setup = Setup(Purpose.REWARD, paths, timeout_s, memory_bytes, offline=True)
    answers: list[list[Score]] = []
    host: UserHost | None = None
    try:
        for at, wanted in enumerate(functions):
            scores: list[Score] = []
            answers.append(scores)
            for group in groups:
                if host is not None and host.leaving.is_set():
                    await host.end()
                    host = None
                if host is None:
                    host = await UserHost.start(setup, environment=environment, output=subprocess.DEVNULL)
                call = RewardCall(at, list(group if host.ready.group[at] else group[:1]), [])
                ended = await host.make(call)
                made = call.scores_of(wanted.path, ended.failed if isinstance(ended, Broken) else ended)
                scores.append(next((score for score in made if score.value is None), made[0]))
                if scores[-1].value is None:
                    break
    finally:
        if host is not None:
            await host.end()
    return answers
